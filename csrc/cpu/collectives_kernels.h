/* The element-wise loops of collectives.c, as pool.h says. T: the type of a buffer; W: that of the accumulator; LOAD:
 * from the one to the other. */

/* W: a type wide enough to divide T by any int. */
#define NCS_DIVIDE(name, T, W)                                                     \
  NCS_TARGET static void NCS_KERNEL(name)(void* acc_, size_t count, int n_ranks) { \
    T* acc = acc_;                                                                 \
    const W n = (W)n_ranks;                                                        \
    for (size_t i = 0; i < count; ++i) acc[i] = (T)((W)acc[i] / n);                \
  }

#define NCS_SCALE(ours, T, W, LOAD)                                                                             \
  NCS_TARGET static void NCS_KERNEL(ours##_scale)(void* acc_, const void* a_, double weight, size_t count) {    \
    W* acc = acc_;                                                                                              \
    const T* a = a_;                                                                                            \
    const W w = (W)weight;                                                                                      \
    NCS_INDEPENDENT for (size_t i = 0; i < count; ++i) acc[i] = LOAD(a[i]) * w;                                 \
  }                                                                                                             \
  NCS_TARGET static void NCS_KERNEL(ours##_add_scaled)(void* acc_, const void* a_, const void* b_, double weight, \
                                                       size_t count) {                                          \
    W* acc = acc_;                                                                                              \
    const W* a = a_;                                                                                            \
    const T* b = b_;                                                                                            \
    const W w = (W)weight;                                                                                      \
    NCS_INDEPENDENT for (size_t i = 0; i < count; ++i) acc[i] = a[i] + LOAD(b[i]) * w;                          \
  }

#define NCS_SUM_LINES(ours, T)                                                                                       \
  NCS_TARGET static void NCS_KERNEL(ours##_sum_lines)(const ncs_reduction* t, const ncs_reduced* tensor, size_t at,  \
                                                      size_t end) {                                                  \
    typedef T line __attribute__((vector_size(NCS_LINE_BYTES)));                                                     \
    const void* const* sends = tensor->sends;                                                                        \
    void* const* outs = tensor->recvs;                                                                               \
    const double* weights = t->weights;                                                                              \
    const int n_ranks = t->n_ranks, n_outs = tensor->n_recvs, divides = t->divides;                                  \
    for (; at < end; at += NCS_LINE_BYTES) {                                                                         \
      line sum = {0}, next;                                                                                          \
      int first = 1;                                                                                                 \
      for (int r = 0; r < n_ranks; ++r) {                                                                            \
        const double weight = weights != NULL ? weights[r] : 1;                                                      \
        if (weight == 0) continue;                                                                                   \
        memcpy(&next, (const char*)sends[r] + at, sizeof(next));                                                     \
        next *= (T)weight;                                                                                           \
        sum = first ? next : sum + next; /* not from 0: that would lose a negative zero */                           \
        first = 0;                                                                                                   \
      }                                                                                                              \
      if (divides) sum /= (T)n_ranks;                                                                                \
      for (int o = 0; o < n_outs; ++o) stream_line((char*)outs[o] + at, &sum);                                       \
    }                                                                                                                \
  }

/* ---- 16-bit floats, which are added up in float32 ---- */

NCS_TARGET static inline float NCS_KERNEL(from_Float16)(uint16_t half) {
  const uint32_t shifted = (uint32_t)(half & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  /* A subnormal half is a normal float: set 2^-14's exponent, which counts the mantissa once too much, and subtract
   * 2^-14. Both operands are normal, so this is exact and fast. */
  const uint32_t subnormal = ncs_float_bits(ncs_bits_float(shifted + 0x38800000u) - ncs_bits_float(0x38800000u));
  uint32_t bits = shifted + 0x38000000u;                              /* rebias the exponent, 15 to 127 */
  bits = exponent == 0x0f800000u ? shifted + 0x70000000u : bits;      /* infinity, NaN: all ones */
  bits = exponent == 0 ? subnormal : bits;
  return ncs_bits_float(bits | (uint32_t)(half & 0x8000u) << 16);
}

NCS_TARGET static inline uint16_t NCS_KERNEL(to_Float16)(float value) {
  const uint32_t all = ncs_float_bits(value);
  const uint32_t bits = all & 0x7fffffffu;
  /* Adding 0.5 leaves the half's subnormal mantissa in the low bits, rounded to nearest even by the addition. */
  const uint32_t subnormal = ncs_float_bits(ncs_bits_float(bits) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t half = bits < 0x38800000u ? subnormal : normal;
  half = bits >= 0x47800000u ? special : half; /* from 2^16 on; 65520 to 2^16 carry into infinity by themselves */
  return (uint16_t)(half | (all >> 16 & 0x8000u));
}

NCS_TARGET static inline float NCS_KERNEL(from_Bfloat16)(uint16_t half) {
  return ncs_bits_float((uint32_t)half << 16);
}

/* Rounding cannot carry a NaN into infinity: the low half is zero in every NaN here, as each comes from a bfloat16 or
 * is the processor's own. */
NCS_TARGET static inline uint16_t NCS_KERNEL(to_Bfloat16)(float value) {
  const uint32_t bits = ncs_float_bits(value);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* ---- All dtypes ---- */

/* U: T itself, or an integer's unsigned twin, in which overflow wraps instead of being undefined. x != x: a NaN so far
 * stays; a NaN in y is taken because no comparison with it is true. */
#define NCS_COMBINES(ours, T, W, U, LOAD)                      \
  NCS_LOOP(ours##_sum, T, W, LOAD, (U)x + (U)y)                \
  NCS_LOOP(ours##_prod, T, W, LOAD, (U)x * (U)y)               \
  NCS_LOOP(ours##_max, T, W, LOAD, (x > y) | (x != x) ? x : y) \
  NCS_LOOP(ours##_min, T, W, LOAD, (x < y) | (x != x) ? x : y)

#define NCS_INTEGER(ours, T, U, W)       \
  NCS_COMBINES(ours, T, T, U, NCS_AS_IS) \
  NCS_DIVIDE(ours##_divide, T, W)

#define NCS_FLOATING(ours, T)            \
  NCS_COMBINES(ours, T, T, T, NCS_AS_IS) \
  NCS_SCALE(ours, T, T, NCS_AS_IS)       \
  NCS_SUM_LINES(ours, T)                 \
  NCS_DIVIDE(ours##_divide, T, T)

#define NCS_HALF(ours)                                                                           \
  NCS_COMBINES(ours, uint16_t, float, float, NCS_KERNEL(from_##ours))                            \
  NCS_SCALE(ours, uint16_t, float, NCS_KERNEL(from_##ours))                                      \
  NCS_DIVIDE(ours##_divide, float, float)                                                        \
  NCS_TARGET static void NCS_KERNEL(ours##_narrow)(void* out_, const void* acc_, size_t count) { \
    uint16_t* out = out_;                                                                        \
    const float* acc = acc_;                                                                     \
    NCS_INDEPENDENT for (size_t i = 0; i < count; ++i) out[i] = NCS_KERNEL(to_##ours)(acc[i]);   \
  }

/* As NCCL's enum names them. */
#define NCS_DTYPES(INTEGER, FLOATING, HALF)     \
  INTEGER(Int8, int8_t, uint8_t, int32_t)       \
  INTEGER(Uint8, uint8_t, uint8_t, int32_t)     \
  INTEGER(Int32, int32_t, uint32_t, int32_t)    \
  INTEGER(Uint32, uint32_t, uint32_t, uint32_t) \
  INTEGER(Int64, int64_t, uint64_t, int64_t)    \
  INTEGER(Uint64, uint64_t, uint64_t, uint64_t) \
  FLOATING(Float32, float)                      \
  FLOATING(Float64, double)                     \
  HALF(Float16)                                 \
  HALF(Bfloat16)

NCS_DTYPES(NCS_INTEGER, NCS_FLOATING, NCS_HALF)

/* Indexed by ncclDataType_t; `combine` by ncclRedOp_t. */
#define NCS_ENTRY(ours, ...)                                                                           \
  [nccl##ours] = {.combine = {NCS_KERNEL(ours##_sum), NCS_KERNEL(ours##_prod), NCS_KERNEL(ours##_max), \
                              NCS_KERNEL(ours##_min)},                                                 \
                  .divide = NCS_KERNEL(ours##_divide), __VA_ARGS__},
#define NCS_INTEGER_ENTRY(ours, T, U, W) NCS_ENTRY(ours, .scale = NULL)
#define NCS_SCALED_ENTRY(ours, ...) \
  NCS_ENTRY(ours, .scale = NCS_KERNEL(ours##_scale), .add_scaled = NCS_KERNEL(ours##_add_scaled), __VA_ARGS__)
#define NCS_FLOATING_ENTRY(ours, T) NCS_SCALED_ENTRY(ours, .sum_lines = NCS_KERNEL(ours##_sum_lines))
#define NCS_HALF_ENTRY(ours) NCS_SCALED_ENTRY(ours, .narrow = NCS_KERNEL(ours##_narrow))

static const ncs_kernels NCS_KERNEL(table)[] = {NCS_DTYPES(NCS_INTEGER_ENTRY, NCS_FLOATING_ENTRY, NCS_HALF_ENTRY)};

/* The other macros are the same each time. */
#undef NCS_KERNEL
#undef NCS_TARGET
