/* The loops of arithmetic.c; included like collectives_kernels.h, and for each type T: float or double. */

#define NCS_LOOP(name, expression)                                                                         \
  NCS_TARGET static void NCS_KERNEL(name)(void* out_, const void* a_, const void* b_, size_t count) {      \
    T* out = out_;                                                                                         \
    const T *a = a_, *b = b_;                                                                              \
    NCS_INDEPENDENT for (size_t i = 0; i < count; ++i) {                                                   \
      const T x = a[i], y = b[i];                                                                          \
      (void)y;                                                                                             \
      out[i] = (expression);                                                                               \
    }                                                                                                      \
  }

/* A ReLU's gradient is a product, as in TensorFlow: if infinite, it is NaN where the feature is not positive. */
#define NCS_LOOPS(X)                                 \
  X(ADD, x + y)                                      \
  X(SUBTRACT, x - y)                                 \
  X(MULTIPLY, x* y)                                  \
  X(DIVIDE, x / y)                                   \
  X(SQUARED_DIFFERENCE, (x - y) * (x - y))           \
  X(RELU_GRADIENT, x*(y > 0 ? (T)1 : (T)0))          \
  X(SQUARE, x* x)                                    \
  X(SQRT, NCS_SQRT_OF(x))                            \
  X(NEGATE, -x)                                      \
  X(RELU, (x > 0) | (x != x) ? x : (T)0)

NCS_LOOPS(NCS_LOOP)

/* One element, many times. */
NCS_TARGET static void NCS_KERNEL(fill)(void* out_, const void* a, const void* b, size_t count) {
  T* out = out_;
  const T x = *(const T*)a;
  (void)b;
  for (size_t i = 0; i < count; ++i) out[i] = x;
}

#define NCS_LOOP_ENTRY(name, expression) [NCS_##name] = NCS_KERNEL(name),
static const ncs_loop NCS_KERNEL(loops)[] = {[NCS_FILL] = NCS_KERNEL(fill), NCS_LOOPS(NCS_LOOP_ENTRY)};

/* The other macros are the same each time. */
#undef NCS_KERNEL
#undef NCS_TARGET
#undef NCS_SQRT_OF
#undef T
