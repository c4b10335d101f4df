/* The loops of arithmetic.c, as pool.h says, in the order of ncs_arithmetic. A ReLU's gradient is a product, as in
 * TensorFlow: if infinite, it is NaN where the feature is not positive. */
#define NCS_LOOPS(X)                           \
  X(ADD, x + y)                                \
  X(SUBTRACT, x - y)                           \
  X(MULTIPLY, x* y)                            \
  X(DIVIDE, x / y)                             \
  X(SQUARED_DIFFERENCE, (x - y) * (x - y))     \
  X(ADD_ALIKE, x + y)                          \
  X(RELU_GRADIENT, x*(y > 0 ? 1.0f : 0.0f))    \
  X(LIKE, x)                                   \
  X(SQUARE, x* x)                              \
  X(SQRT, sqrtf(x))                            \
  X(NEGATE, -x)                                \
  X(RELU, (x > 0) | (x != x) ? x : 0.0f)

#define NCS_OPERATION(name, expression) NCS_LOOP(name, float, float, NCS_AS_IS, expression)
#define NCS_ENTRY(name, expression) [NCS_##name] = NCS_KERNEL(name),
NCS_LOOPS(NCS_OPERATION)
static const ncs_loop NCS_KERNEL(loops)[] = {NCS_LOOPS(NCS_ENTRY)};

/* The other macros are the same each time. */
#undef NCS_KERNEL
#undef NCS_TARGET
