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

// A stage between the halves of 2 * half floats.
KVARN_ALWAYS_INLINE void join_halves(float* x, int half, f32 norm) {
  for (int i = 0; i < half; i += 16) {
    const f32 a = load(x + i);
    const f32 b = load(x + i + half);
    store(x + i, mul(add(a, b), norm));
    store(x + i + half, mul(sub(a, b), norm));
  }
}

// kvarn::detail::paley_transform over vectors: element j of 2 * count at in + stride * j floats.
inline void paley(int core, const float* in, std::ptrdiff_t stride, float* out,
                  std::ptrdiff_t out_stride) {
  const int count = core / 2;
  const float* signs = core == 12   ? kvarn::detail::conference_signs<5>.sign[0]
                       : core == 20 ? kvarn::detail::conference_signs<9>.sign[0]
                                    : kvarn::detail::conference_signs<13>.sign[0];
  alignas(64) float sum[14][16];
  alignas(64) float difference[14][16];
  for (int i = 0; i < count; ++i) {
    const f32 a = load(in + stride * (2 * i));
    const f32 b = load(in + stride * (2 * i + 1));
    store(sum[i], add(a, b));
    store(difference[i], sub(a, b));
  }
  for (int i = 0; i < count; ++i, signs += count) {
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

// The stages within the lanes of 16 channels at p. `largest`: of magnitude_bits.
template <class T>
KVARN_ALWAYS_INLINE f32 load_rotated(const T* p, i32& largest) {
  const f32 x = load_channels(p);
  largest = max(largest, magnitude_bits(x));
  f32 a;
  if constexpr (std::is_same_v<T, float>)
    a = load_butterfly(p);
  else
    a = butterfly<1>(x);
  return butterfly<8>(butterfly<4>(butterfly<2>(a)));
}

// 16 * Count channels, times norm. The result: magnitude_bits of the largest ones.
template <int Count, class T>
KVARN_ALWAYS_INLINE i32 rotate_registers(const T* in, float* out, float norm) {
  f32 r[Count];
  i32 largest = set1_i32(0);
  KVARN_UNROLL
  for (int i = 0; i < Count; ++i) r[i] = load_rotated(in + 16 * i, largest);
  butterflies<1, Count>(r);
  KVARN_UNROLL
  for (int i = 0; i < Count; ++i) store(out + 16 * i, mul(r[i], set1(norm)));
  return largest;
}

// n = core * block channels with block 4, 8 or 16, times norm.
inline void rotate_with_core(float* x, int n, int core, f32 norm) {
  const int block = n / core;
  // Of blocks below 16 the vectors overlap, and the last one reaches beyond the end.
  alignas(64) float buffer[max_head_dim + 16];
  for (int i = 0; i < n; i += 16) {
    f32 a = butterfly<2>(load_butterfly(x + i));
    if (block >= 8) a = butterfly<4>(a);
    if (block >= 16) a = butterfly<8>(a);
    store(buffer + i, a);
  }
  store(buffer + n, set1(0.0f));
  paley(core, buffer, block, buffer, block);
  for (int i = 0; i < n; i += 16) store(x + i, mul(load(buffer + i), norm));
}

// Out of line, so that the common sizes need no frame.
[[gnu::noinline]] inline void rotate_other(float* x, int n, float norm) {
  const int core = hadamard_core(n);
  KVARN_ASSERT(core != 0);
  if (n == 512) {
    rotate_registers<16>(x, x, 1.0f);
    rotate_registers<16>(x + 256, x + 256, 1.0f);
    join_halves(x, 256, set1(norm));
  } else if (core != 1 && n % 16 == 0 && n / core <= 16) {
    rotate_with_core(x, n, core, set1(norm));
  } else {
    kvarn::hadamard_unnormalized(x, n);
    for (int i = 0; i < n; ++i) x[i] = x[i] * norm;
  }
}

[[gnu::noinline]] inline void rotate_vector(float* x, int n, float norm) {
  if (n == 64)
    rotate_registers<4>(x, x, norm);
  else if (n == 128)
    rotate_registers<8>(x, x, norm);
  else if (n == 256)
    rotate_registers<16>(x, x, norm);
  else
    rotate_other(x, n, norm);
}

// As kvarn::hadamard_unnormalized and kvarn::hadamard; fast for the supported head dimensions.
inline void hadamard_unnormalized(float* x, int n) { rotate_vector(x, n, 1.0f); }
inline void hadamard(float* x, int n) { rotate_vector(x, n, hadamard_norm(n)); }
inline void hadamard(float* x, int n, int count, std::ptrdiff_t stride) {
  const float norm = hadamard_norm(n);
  for (int i = 0; i < count; ++i) rotate_vector(x + i * stride, n, norm);
}

// The first stages of 16 vectors, of which r[i] has channel c + i for c a multiple of 16; block is
// n / core.
KVARN_ALWAYS_INLINE void first_column_stages(f32 (&r)[16], int block) {
  if (block >= 16)
    butterflies<1, 16>(r);
  else if (block == 8)
    butterflies<1, 8>(r);
  else
    butterflies<1, 4>(r);
}

// Stages half, 2 half, ... < Radix * half over n channels. Channel c of 16 vectors stands at
// in + 16 c and goes to out + stride * c.
template <int Radix>
KVARN_ALWAYS_INLINE void column_stages(const float* in, int n, int half, float* out,
                                       std::ptrdiff_t stride) {
  for (int block = 0; block < n; block += Radix * half)
    for (int c = block; c < block + half; ++c) {
      f32 r[Radix];
      KVARN_UNROLL
      for (int i = 0; i < Radix; ++i) r[i] = load(in + 16 * (c + i * half));
      butterflies<1, Radix>(r);
      KVARN_UNROLL
      for (int i = 0; i < Radix; ++i) store(out + stride * (c + i * half), r[i]);
    }
}

// What first_column_stages leaves to do, for n a supported head dimension: from `columns`, 16
// floats a channel, which it changes, to out + stride * channel.
inline void rotate_columns(float* columns, int n, float* out, std::ptrdiff_t stride) {
  const int core = hadamard_core(n);
  if (core != 1) {
    const int block = n / core;
    for (int i = 0; i < block; ++i)
      paley(core, columns + 16 * i, 16 * block, out + stride * i, stride * block);
    return;
  }
  if (n == 64) column_stages<4>(columns, n, 16, out, stride);
  if (n == 128) column_stages<8>(columns, n, 16, out, stride);
  if (n == 256) column_stages<16>(columns, n, 16, out, stride);
  if (n == 512) {
    column_stages<8>(columns, n, 16, columns, 16);
    column_stages<4>(columns, n, 128, out, stride);
  }
}
