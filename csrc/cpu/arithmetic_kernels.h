/* The loops of arithmetic.c, as pool.h says. */

#define NCS_OPERATION(T, name, expression) NCS_LOOP(T##_##name, T, T, NCS_AS_IS, expression)

/* A ReLU's gradient is a product, as in TensorFlow: if infinite, it is NaN where the feature is not positive. */
#define NCS_LOOPS(X, T, root)                  \
  X(T, ADD, x + y)                             \
  X(T, SUBTRACT, x - y)                        \
  X(T, MULTIPLY, x* y)                         \
  X(T, DIVIDE, x / y)                          \
  X(T, SQUARED_DIFFERENCE, (x - y) * (x - y))  \
  X(T, RELU_GRADIENT, x*(y > 0 ? (T)1 : (T)0)) \
  X(T, SQUARE, x* x)                           \
  X(T, SQRT, root(x))                          \
  X(T, NEGATE, -x)                             \
  X(T, RELU, (x > 0) | (x != x) ? x : (T)0)

#define NCS_LOOP_ENTRY(T, name, expression) [NCS_##name] = NCS_KERNEL(T##_##name),

/* `fill`: one element, many times. */
#define NCS_LOOPS_OF(T, root)                                                                           \
  NCS_LOOPS(NCS_OPERATION, T, root)                                                                     \
  NCS_TARGET static void NCS_KERNEL(T##_fill)(void* out_, const void* a, const void* b, size_t count) { \
    T* out = out_;                                                                                      \
    const T x = *(const T*)a;                                                                           \
    (void)b;                                                                                            \
    for (size_t i = 0; i < count; ++i) out[i] = x;                                                      \
  }                                                                                                     \
  static const ncs_loop NCS_KERNEL(T##_loops)[] = {[NCS_FILL] = NCS_KERNEL(T##_fill),                   \
                                                      NCS_LOOPS(NCS_LOOP_ENTRY, T, root)};

NCS_LOOPS_OF(float, sqrtf)
NCS_LOOPS_OF(double, sqrt)

/* The other macros are the same each time. */
#undef NCS_KERNEL
#undef NCS_TARGET
