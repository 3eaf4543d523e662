// Attention over keys and values in 8 bits, blocks of 32 channels with a binary16 scale as q8_0 has
// them; included inside the region of AVX-512. Keys by integer dot products with queries in 8 bits,
// 16 tokens a vector; values converted, their scales folded into the softmax weights.

// Queries in 8 bits: block b of query h at quads[h][8 b].
struct byte_queries {
  alignas(64) std::int32_t quads[max_rows][kvarn::max_head_dim / 4];
  float scale[max_rows][kvarn::max_head_dim / byte_block];
  std::int32_t offset[max_rows][kvarn::max_head_dim / byte_block];  // 128 * the sum of the bytes
};

inline void quantize_queries(const float* queries, int rows, int head_dim, byte_queries& out) {
  for (int h = 0; h < rows; ++h)
    for (int b = 0; b < head_dim / byte_block; ++b) {
      const float* const x = queries + h * head_dim + b * byte_block;
      const float largest =
          max_lane(max_magnitude(max_magnitude(set1(0.0f), load(x)), load(x + 16)));
      const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      std::int8_t bytes[byte_block];
      std::int32_t sum = 0;
      for (int i = 0; i < byte_block; ++i) {
        bytes[i] = static_cast<std::int8_t>(std::nearbyint(x[i] * inverse));
        sum += bytes[i];
      }
      std::memcpy(out.quads[h] + 8 * b, bytes, sizeof(bytes));
      out.scale[h][b] = largest / 127.0f;
      out.offset[h][b] = 128 * sum;
    }
}

// Scores of the 16 tokens of a tile. Prefetches the tile at `next`.
template <int Rows>
void score_bytes(const std::byte* tile, const std::byte* next, int head_dim,
                 const byte_queries& queries, int row, int token, float (*scores)[block_tokens]) {
  const std::byte* const scales = tile + std::ptrdiff_t{16} * head_dim;
  f32 total[Rows];
  KVARN_UNROLL
  for (int h = 0; h < Rows; ++h) total[h] = set1(0.0f);
  for (int d = 0; d < head_dim; d += 64) {
    // Sixteen words of 16 tokens, a token a lane: no horizontal sums.
    f32 w[16];
    KVARN_UNROLL
    for (int t = 0; t < 16; ++t) {
      prefetch_lines(next + t * head_dim + d, 1);
      w[t] = load(reinterpret_cast<const float*>(tile + t * head_dim + d));
    }
    transpose(w);
    KVARN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int b = d / byte_block + half;
      i32 sum[2][Rows];
      KVARN_UNROLL
      for (int h = 0; h < Rows; ++h) sum[0][h] = sum[1][h] = set1_i32(0);
      KVARN_UNROLL
      for (int j = 0; j < 8; ++j) KVARN_UNROLL
      for (int h = 0; h < Rows; ++h)
        dot_bytes(sum[j % 2][h], bits(w[8 * half + j]), queries.quads[row + h] + 8 * b + j);
      const f32 key_scale = load_half(scales + 32 * b);
      KVARN_UNROLL
      for (int h = 0; h < Rows; ++h) {
        const i32 both = add(sum[0][h], sum[1][h]);
        const f32 product = to_float(sub(both, set1_i32(queries.offset[row + h][b])));
        total[h] = fma(product, mul(key_scale, set1(queries.scale[row + h][b])), total[h]);
      }
    }
  }
  KVARN_UNROLL
  for (int h = 0; h < Rows; ++h) store(scores[h] + token, total[h]);
}

// values[h] = values[h] * rescale[h] + the weighted sum of the values of block_tokens tokens.
// Prefetches the tiles at `next`.
template <int Rows>
void sum_bytes(const std::byte* tiles, const std::byte* next, std::ptrdiff_t tile_bytes,
               int head_dim, const float (*weights)[block_tokens], const float* rescale,
               float* values) {
  for (int b = 0; b < head_dim / byte_block; ++b) {
    alignas(64) float scaled[Rows][block_tokens];
    f32 offset[Rows];
    KVARN_UNROLL
    for (int h = 0; h < Rows; ++h) offset[h] = set1(0.0f);
    for (int t = 0; t < block_tokens; t += 16) {
      const f32 scale =
          load_half(tiles + t / 16 * tile_bytes + std::ptrdiff_t{16} * head_dim + 32 * b);
      KVARN_UNROLL
      for (int h = 0; h < Rows; ++h) {
        const f32 x = mul(load(weights[h] + t), scale);
        offset[h] = add(offset[h], x);
        store(scaled[h] + t, x);
      }
    }
    f32 sum[Rows][2];
    KVARN_UNROLL
    for (int h = 0; h < Rows; ++h) sum[h][0] = sum[h][1] = set1(-128.0f * fold(offset[h]));
    for (int t = 0; t < block_tokens; ++t) {
      const std::byte* const value =
          tiles + t / 16 * tile_bytes + std::ptrdiff_t{t % 16} * head_dim + byte_block * b;
      // One of the blocks of channels asks for a part of each line that it reads of the next tiles.
      if (b % 2 == 0) prefetch_lines(next + (value - tiles), 1);
      const f32 low = to_float(load_u8(value));
      const f32 high = to_float(load_u8(value + 16));
      KVARN_UNROLL
      for (int h = 0; h < Rows; ++h) {
        const f32 weight = set1(scaled[h][t]);
        sum[h][0] = fma(weight, low, sum[h][0]);
        sum[h][1] = fma(weight, high, sum[h][1]);
      }
    }
    for (int h = 0; h < Rows; ++h) KVARN_UNROLL
    for (int i = 0; i < 2; ++i) {
      float* const at = values + h * head_dim + byte_block * b + 16 * i;
      store(at, fma(load(at), set1(rescale[h]), sum[h][i]));
    }
  }
}

template <int Rows>
void attend_byte_block(const byte_memory& memory, std::ptrdiff_t at, std::ptrdiff_t next, int row,
                       const byte_queries& queries, attention_state& state) {
  const int dim = memory.head_dim;
  const std::ptrdiff_t tile_bytes = memory.tile_bytes();
  alignas(64) float scores[Rows][block_tokens];
  float rescale[Rows];
  for (int t = 0; t < block_tokens; t += 16) {
    const std::ptrdiff_t tile = t / 16 * tile_bytes;
    score_bytes<Rows>(memory.keys + at + tile, memory.keys + next + tile, dim, queries, row, t,
                      scores);
  }
  for (int h = 0; h < Rows; ++h)
    weigh_block(scores[h], state.maximum[row + h], state.sum[row + h], rescale[h]);
  sum_bytes<Rows>(memory.values + at, memory.values + next, tile_bytes, dim, scores, rescale,
                  state.values + row * dim);
}

inline void attend_bytes(const byte_memory& memory, const dense_queries& queries,
                         attention_state& state) {
  start_rows(queries, memory.head_dim, state);
  byte_queries bytes;
  quantize_queries(state.queries, queries.rows, memory.head_dim, bytes);
  const std::ptrdiff_t block = block_tokens / 16 * memory.tile_bytes();
  const std::ptrdiff_t end = memory.tokens / 16 * memory.tile_bytes();
  for (std::ptrdiff_t at = 0; at < end; at += block) {
    const std::ptrdiff_t next = at + block < end ? at + block : at;
    for (int row = 0; row < queries.rows;) {
      const int left = queries.rows - row;
      if (left >= 4) {
        attend_byte_block<4>(memory, at, next, row, bytes, state);
        row += 4;
      } else if (left >= 2) {
        attend_byte_block<2>(memory, at, next, row, bytes, state);
        row += 2;
      } else {
        attend_byte_block<1>(memory, at, next, row, bytes, state);
        row += 1;
      }
    }
  }
  finish_rows(state, queries.rows, memory.head_dim, queries.out);
}
