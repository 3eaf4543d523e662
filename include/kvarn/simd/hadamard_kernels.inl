// The Hadamard rotation, written once; included inside the region and namespace of each instruction
// set. Of one vector a lane is a channel; of 16 vectors at once (columns) a lane is a vector, and
// no stage needs a shuffle. The definition: codec/hadamard.hpp; the orders of additions are the
// same.

// Stages between registers at distances First, 2 First, ... < End.
template <int First, int End, int Count>
KVARN_ALWAYS_INLINE void butterflies(f32 (&r)[Count]) {
  if constexpr (First < End) {
    KVARN_UNROLL
    for (int i = 0; i < Count; i += 2 * First) KVARN_UNROLL
    for (int k = i; k < i + First; ++k) {
      const f32 a = r[k];
      const f32 b = r[k + First];
      r[k] = add(a, b);
      r[k + First] = sub(a, b);
    }
    butterflies<2 * First, End>(r);
  }
}

// kvarn::detail::paley_transform over vectors: element j of 2 * count at in + stride * j floats.
KVARN_NOINLINE void paley(int core, const float* in, std::ptrdiff_t stride, float* out,
                          std::ptrdiff_t out_stride) {
  const int count = core / 2;
  const float* signs = core == 12   ? kvarn::detail::conference_signs<5>.sign[0]
                       : core == 20 ? kvarn::detail::conference_signs<9>.sign[0]
                                    : kvarn::detail::conference_signs<13>.sign[0];
  alignas(64) float sum[14][16];
  alignas(64) float difference[14][16];
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const f32 a = load(in + stride * (2 * i));
    const f32 b = load(in + stride * (2 * i + 1));
    store(sum[i], add(a, b));
    store(difference[i], sub(a, b));
  }
  for (std::ptrdiff_t i = 0; i < count; ++i, signs += count) {
    f32 even = load(difference[i]);
    f32 odd = sub(set1(-0.0f), load(sum[i]));
    for (int j = 0; j < count; ++j) {
      if (j == i) continue;
      const f32 sign = set1(signs[j]);
      even = fma(load(sum[j]), sign, even);  // an addition or a subtraction
      odd = fma(load(difference[j]), sign, odd);
    }
    store(out + out_stride * (2 * i), even);
    store(out + out_stride * (2 * i + 1), odd);
  }
}

// 16 * Count channels, times norm.
template <int Count>
KVARN_ALWAYS_INLINE void rotate_registers(const float* in, float* out, float norm) {
  f32 r[Count];
  KVARN_UNROLL
  for (std::ptrdiff_t i = 0; i < Count; ++i)
    r[i] = butterfly<8>(butterfly<4>(butterfly<2>(load_butterfly(in + 16 * i))));
  butterflies<1, Count>(r);
  KVARN_UNROLL
  for (std::ptrdiff_t i = 0; i < Count; ++i) store(out + 16 * i, mul(r[i], set1(norm)));
}

// 128 channels, times norm.
KVARN_NOINLINE void rotate_128(const float* in, float* out, float norm) {
  rotate_registers<8>(in, out, norm);
}

// n = core * block channels with block 4, 8 or 16, times norm.
KVARN_NOINLINE void rotate_with_core(const float* in, float* out, int n, int core, float norm) {
  const int block = n / core;
  // Of blocks below 16 the vectors overlap, and the last one reaches beyond the end.
  alignas(64) float buffer[max_head_dim + 16];
  for (int i = 0; i < n; i += 16) {
    f32 a = butterfly<2>(load_butterfly(in + i));
    if (block >= 8) a = butterfly<4>(a);
    if (block >= 16) a = butterfly<8>(a);
    store(buffer + i, a);
  }
  store(buffer + n, set1(0.0f));
  paley(core, buffer, block, buffer, block);
  for (int i = 0; i < n; i += 16) store(out + i, mul(load(buffer + i), set1(norm)));
}

// A power of two of at least 256 channels, times norm: 128 at a time, then one stage after another.
KVARN_NOINLINE void rotate_long(const float* in, float* out, int n, float norm) {
  for (int i = 0; i < n; i += 128) rotate_128(in + i, out + i, 1.0f);
  for (int half = 128; half < n; half *= 2) {
    const f32 factor = set1(2 * half == n ? norm : 1.0f);
    for (int block = 0; block < n; block += 2 * half)
      for (int i = block; i < block + half; i += 16) {
        const f32 a = load(out + i);
        const f32 b = load(out + i + half);
        store(out + i, mul(add(a, b), factor));
        store(out + i + half, mul(sub(a, b), factor));
      }
  }
}

// out = H in * norm; `in` may be `out`. Fast for the supported head dimensions.
KVARN_NOINLINE void rotate_vector(const float* in, float* out, int n, float norm) {
  const int core = hadamard_core(n);
  KVARN_ASSERT(core != 0);
  if (n == 128) {
    rotate_128(in, out, norm);
  } else if (n == 64) {
    rotate_registers<4>(in, out, norm);
  } else if (core == 1 && n >= 256 && n <= max_head_dim) {
    rotate_long(in, out, n, norm);
  } else if (core != 1 && n % 16 == 0 && n / core <= 16) {
    rotate_with_core(in, out, n, core, norm);
  } else {
    if (in != out) std::memcpy(out, in, sizeof(float) * static_cast<std::size_t>(n));
    kvarn::hadamard_unnormalized(out, n);
    for (int i = 0; i < n; ++i) out[i] = out[i] * norm;
  }
}

// As kvarn::hadamard_unnormalized and kvarn::hadamard.
KVARN_ALWAYS_INLINE void hadamard_unnormalized(float* x, int n) { rotate_vector(x, x, n, 1.0f); }
KVARN_ALWAYS_INLINE void hadamard(float* x, int n) { rotate_vector(x, x, n, hadamard_norm(n)); }
inline void hadamard(float* x, int n, int count, std::ptrdiff_t stride) {
  const float norm = hadamard_norm(n);
  for (int i = 0; i < count; ++i) rotate_vector(x + i * stride, x + i * stride, n, norm);
}

// Stages half, 2 half, ... < Radix * half within blocks of channels, over n channels of 16 vectors.
// Channel c stands at in + 16 c and goes to out + stride * c; `in` may be `out`.
template <int Radix>
KVARN_NOINLINE void column_stages(const float* in, int n, int half, float* out,
                                  std::ptrdiff_t stride) {
  for (int block = 0; block < n; block += Radix * half)
    for (int c = block; c < block + half; ++c) {
      f32 r[Radix];
      KVARN_UNROLL
      for (std::ptrdiff_t i = 0; i < Radix; ++i) r[i] = load(in + 16 * (c + i * half));
      butterflies<1, Radix>(r);
      KVARN_UNROLL
      for (std::ptrdiff_t i = 0; i < Radix; ++i) store(out + stride * (c + i * half), r[i]);
    }
}

// The stages 1, 2, 4 and 8, in place.
KVARN_NOINLINE void first_column_stages(float* columns, int n) {
  for (std::ptrdiff_t c = 0; c < n; c += 16) {
    f32 r[16];
    KVARN_UNROLL
    for (int i = 0; i < 16; ++i) r[i] = load(columns + 16 * (c + i));
    butterflies<1, 16>(r);
    KVARN_UNROLL
    for (int i = 0; i < 16; ++i) store(columns + 16 * (c + i), r[i]);
  }
}

// The rotation of 16 vectors, n channels, a supported head dimension, from stage `half` on. Takes
// and changes `columns`, 16 floats a channel, and writes to out + stride * channel, which may be
// the same.
KVARN_NOINLINE void rotate_columns(float* columns, int n, int half, float* out,
                                   std::ptrdiff_t stride) {
  const int core = hadamard_core(n);
  const std::ptrdiff_t block = n / core;
  if (holds_16_vectors && half == 1 && block >= 16) {
    first_column_stages(columns, n);
    half = 16;
  }
  while (half < block) {
    // Fourfold passes, but one for an odd number of stages.
    const std::ptrdiff_t left = block / half;
    const bool odd = (left & 0x2aa) != 0;
    const int radix = odd ? odd_radix : 4;
    const bool ends = core == 1 && left == radix;
    float* const to = ends ? out : columns;
    const std::ptrdiff_t to_stride = ends ? stride : 16;
    if (odd)
      column_stages<odd_radix>(columns, n, half, to, to_stride);
    else
      column_stages<4>(columns, n, half, to, to_stride);
    half *= radix;
  }
  if (core != 1)
    for (std::ptrdiff_t i = 0; i < block; ++i)
      paley(core, columns + 16 * i, 16 * block, out + stride * i, stride * block);
}

// Copies 16 x 16 numbers, transposed: row i at `in` + stride * i to out + out_stride * column;
// times `factor`. Where registers hold the 16 vectors it makes the stages < `block` between the
// columns too. `largest`: of magnitude_bits so far, unless it is null.
template <class T>
KVARN_NOINLINE void transpose_block(const T* in, std::ptrdiff_t stride, float* out,
                                    std::ptrdiff_t out_stride, float factor = 1.0f,
                                    [[maybe_unused]] int block = 1, i32* largest = nullptr) {
  f32 r[16];
  KVARN_UNROLL
  for (int i = 0; i < 16; ++i) r[i] = load_channels(in + stride * i);
  if (largest != nullptr) {
    i32 seen = *largest;
    KVARN_UNROLL
    for (const f32& row : r) seen = max(seen, magnitude_bits(row));
    *largest = seen;
  }
  if (factor != 1.0f) {
    KVARN_UNROLL
    for (f32& row : r) row = mul(row, set1(factor));
  }
  transpose(r);
  if constexpr (holds_16_vectors) {
    if (block >= 4) butterflies<1, 4>(r);
    if (block >= 8) butterflies<4, 8>(r);
    if (block >= 16) butterflies<8, 16>(r);
  }
  KVARN_UNROLL
  for (int i = 0; i < 16; ++i) store(out + out_stride * i, r[i]);
}
// The first stage of a rotation that it leaves to do.
constexpr int stages_of_transpose(int block) {
  return !holds_16_vectors ? 1 : block < 16 ? block : 16;
}
