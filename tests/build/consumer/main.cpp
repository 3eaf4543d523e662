// The smallest user of the library, from an installed or embedded copy: packs a token of ones and
// reads it back.
#include <cmath>
#include <cstddef>
#include <kvarn/kvarn.hpp>
#include <vector>

int main() {
  const kvarn::tile_layout layout;
  std::vector<float> tokens(static_cast<std::size_t>(layout.group * layout.head_dim), 1.0f);
  auto encoder = kvarn::tile_encoder::make(layout).value();
  std::vector<std::byte> record(encoder.record_bytes());
  encoder(kvarn::tokens_view<const float>{tokens.data(), layout.head_dim}, record.data());
  kvarn::decode_tile(kvarn::const_tile_view{record.data(), layout},
                     kvarn::tokens_view<float>{tokens.data(), layout.head_dim});
  return std::fabs(tokens.front() - 1.0f) < 0.01f ? 0 : 1;
}
