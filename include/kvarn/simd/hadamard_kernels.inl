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

// kvarn::detail::paley_transform over vectors: element j at in + stride * j floats.
template <int Q>
void paley(const float* in, std::ptrdiff_t stride, float* out, std::ptrdiff_t out_stride) {
  constexpr auto& matrix = kvarn::detail::conference<Q>.sign;
  f32 sum[Q + 1];
  f32 difference[Q + 1];
  KVARN_UNROLL
  for (int i = 0; i <= Q; ++i) {
    const f32 a = load(in + stride * (2 * i));
    const f32 b = load(in + stride * (2 * i + 1));
    sum[i] = add(a, b);
    difference[i] = sub(a, b);
  }
  KVARN_UNROLL
  for (int i = 0; i <= Q; ++i) {
    f32 even = difference[i];
    f32 odd = sub(set1(-0.0f), sum[i]);
    KVARN_UNROLL
    for (int j = 0; j <= Q; ++j) {
      if (matrix[i][j] > 0) {
        even = add(even, sum[j]);
        odd = add(odd, difference[j]);
      } else if (matrix[i][j] < 0) {
        even = sub(even, sum[j]);
        odd = sub(odd, difference[j]);
      }
    }
    store(out + out_stride * (2 * i), even);
    store(out + out_stride * (2 * i + 1), odd);
  }
}

inline void paley(int core, const float* in, std::ptrdiff_t stride, float* out,
                  std::ptrdiff_t out_stride) {
  if (core == 12) paley<5>(in, stride, out, out_stride);
  if (core == 20) paley<9>(in, stride, out, out_stride);
  if (core == 28) paley<13>(in, stride, out, out_stride);
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

// 16 * Count channels. The result: magnitude_bits of the largest ones.
template <int Count, bool Normalize, class T>
KVARN_ALWAYS_INLINE i32 rotate_registers(const T* in, float* out) {
  const f32 norm = set1(Normalize ? hadamard_norm(16 * Count) : 1.0f);
  f32 r[Count];
  i32 largest = set1_i32(0);
  KVARN_UNROLL
  for (int i = 0; i < Count; ++i) r[i] = load_rotated(in + 16 * i, largest);
  butterflies<1, Count>(r);
  KVARN_UNROLL
  for (int i = 0; i < Count; ++i) store(out + 16 * i, Normalize ? mul(r[i], norm) : r[i]);
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
template <bool Normalize>
[[gnu::noinline]] void rotate_other(float* x, int n) {
  const f32 norm = set1(Normalize ? hadamard_norm(n) : 1.0f);
  const int core = hadamard_core(n);
  KVARN_ASSERT(core != 0);
  if (n == 512) {
    rotate_registers<16, false>(x, x);
    rotate_registers<16, false>(x + 256, x + 256);
    join_halves(x, 256, norm);
  } else if (core != 1 && n % 16 == 0 && n / core <= 16) {
    rotate_with_core(x, n, core, norm);
  } else if constexpr (Normalize) {
    kvarn::hadamard(x, n);
  } else {
    kvarn::hadamard_unnormalized(x, n);
  }
}

template <bool Normalize>
KVARN_ALWAYS_INLINE void rotate_vector(float* x, int n) {
  if (n == 64)
    rotate_registers<4, Normalize>(x, x);
  else if (n == 128)
    rotate_registers<8, Normalize>(x, x);
  else if (n == 256)
    rotate_registers<16, Normalize>(x, x);
  else
    rotate_other<Normalize>(x, n);
}

// As kvarn::hadamard_unnormalized and kvarn::hadamard; fast for the supported head dimensions.
inline void hadamard_unnormalized(float* x, int n) { rotate_vector<false>(x, n); }
inline void hadamard(float* x, int n) { rotate_vector<true>(x, n); }
inline void hadamard(float* x, int n, int count, std::ptrdiff_t stride) {
  for (int i = 0; i < count; ++i) rotate_vector<true>(x + i * stride, n);
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
