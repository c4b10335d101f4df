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

NCS_LOOP(add, x + y)
NCS_LOOP(subtract, x - y)
NCS_LOOP(multiply, x* y)
NCS_LOOP(divide, x / y)
NCS_LOOP(squared_difference, (x - y) * (x - y))
/* A product, as in TensorFlow: with an infinite gradient it is NaN if the feature is not positive. */
NCS_LOOP(relu_gradient, x*(y > 0 ? (T)1 : (T)0))
NCS_LOOP(square, x* x)
NCS_LOOP(sqrt, NCS_SQRT_OF(x))
NCS_LOOP(negate, -x)
NCS_LOOP(relu, (x > 0) | (x != x) ? x : (T)0)

/* One element, many times. */
NCS_TARGET static void NCS_KERNEL(fill)(void* out_, const void* a, const void* b, size_t count) {
  T* out = out_;
  const T x = *(const T*)a;
  (void)b;
  for (size_t i = 0; i < count; ++i) out[i] = x;
}

static const ncs_loop NCS_KERNEL(loops)[] = {
    [NCS_FILL] = NCS_KERNEL(fill),
    [NCS_ADD] = NCS_KERNEL(add),
    [NCS_SUBTRACT] = NCS_KERNEL(subtract),
    [NCS_MULTIPLY] = NCS_KERNEL(multiply),
    [NCS_DIVIDE] = NCS_KERNEL(divide),
    [NCS_SQUARED_DIFFERENCE] = NCS_KERNEL(squared_difference),
    [NCS_RELU_GRADIENT] = NCS_KERNEL(relu_gradient),
    [NCS_SQUARE] = NCS_KERNEL(square),
    [NCS_SQRT] = NCS_KERNEL(sqrt),
    [NCS_NEGATE] = NCS_KERNEL(negate),
    [NCS_RELU] = NCS_KERNEL(relu),
};

#undef NCS_KERNEL
#undef NCS_TARGET
#undef NCS_SQRT_OF
#undef T
