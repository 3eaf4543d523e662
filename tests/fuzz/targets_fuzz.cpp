// libFuzzer on all targets of the machine against the scalar code: the bytes choose a layout, an
// encoder or recipe and numbers of any kind, then a memory and options of attention. Records,
// decoded tokens and attention outputs must have the same bits.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kvarn/attention/attend.hpp"
#include "kvarn/codec/tile_codec.hpp"
#include "support/attention_scenes.hpp"
#include "support/choices.hpp"
#include "support/targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t*, std::size_t);

namespace {

using kvarn::target;
using kvarn_test::choices;

void require(bool same, target on, const char* what) {
  if (same) return;
  std::fprintf(stderr, "%s differs on %s\n", what, std::string(kvarn::name_of(on)).c_str());
  std::abort();
}

kvarn::tile_layout choose_layout(choices& c, kvarn::tile_kind kind) {
  return {.kind = kind,
          .head_dim = c.of(kvarn::supported_head_dims),
          .group = c.of({64, 128}),
          .bits = c.of(kvarn::supported_bits),
          .scale = c.of({kvarn::scale_type::ue5m3, kvarn::scale_type::e4m3})};
}

// Random numbers with channels and tokens of any size, and any bits here and there.
std::vector<float> choose_tokens(choices& c, int tokens, int dim) {
  const float sizes[] = {0.0f, 0x1p-24f, 0x1p-9f, 1.0f, 1.0f, 30.0f, 3000.0f, 0x1p17f};
  const float offsets[] = {0.0f, 0.0f, 0.0f, 1.0f, -300.0f, 0x1p-14f};
  const float size = c.of(sizes);
  const float offset = c.of(offsets);
  const float channel_size = c.of(sizes);
  const int channel = c.below(dim);
  const int zero_token = c.below(2 * tokens);
  auto values = kvarn_test::numbers<float>(static_cast<std::size_t>(tokens * dim),
                                           static_cast<std::uint64_t>(c.below(30000)), size);
  for (int t = 0; t < tokens; ++t)
    for (int d = 0; d < dim; ++d) {
      float& x = values[static_cast<std::size_t>(t * dim + d)];
      x = t == zero_token ? 0.0f : (x + offset) * (d == channel ? channel_size : 1.0f);
    }
  const int odd = c.below(6);
  for (int i = 0; i < odd; ++i) {
    std::uint32_t bits = 0;
    for (int b = 0; b < 4; ++b) bits = bits << 8 | static_cast<std::uint32_t>(c.below(256));
    const int at = c.below(30000) % (tokens * dim);
    std::memcpy(&values[static_cast<std::size_t>(at)], &bits, sizeof(bits));
  }
  return values;
}

template <class T>
void codec(choices& c) {
  const auto layout = choose_layout(c, c.of({kvarn::tile_kind::key, kvarn::tile_kind::value}));
  const auto method = c.of(kvarn::encoder_infos).id;
  const bool rotate = c.below(4) != 0;
  std::vector<T> tokens;
  for (const float x : choose_tokens(c, layout.group, layout.head_dim))
    tokens.push_back(static_cast<T>(x));
  const auto queries = choose_tokens(c, 12, layout.head_dim);
  const kvarn::tokens_view<const float> query_view{queries.data(), layout.head_dim};
  // Sums as a file could have them, of which no queries need to be.
  std::vector<float> sums;
  if (c.below(4) == 0) sums = choose_tokens(c, layout.head_dim, layout.head_dim);
  const auto saved = kvarn::query_moment::from_sums(layout.head_dim, sums, 1);

  struct outcome {
    std::vector<float> upper;
    std::vector<std::byte> record;
    kvarn::encode_report report;
    std::vector<float> decoded;
  };
  const auto run = [&](target on) {
    outcome o;
    kvarn::query_moment moment = saved.ok() ? saved.value() : kvarn::query_moment(layout.head_dim);
    moment.add(query_view, 12, true, on);
    const kvarn::query_factor factor(moment, kvarn::query_factor::default_damping, on);
    o.upper.assign(factor.upper(), factor.upper() + moment.sums().size());
    o.record.resize(layout.record_bytes());
    std::vector<float> workspace(kvarn::encode_workspace(layout));
    o.report = kvarn::encode_tile(
        kvarn::tokens_view<const T>{tokens.data(), layout.head_dim},
        kvarn::tile_view{o.record.data(), layout},
        kvarn::encode_options{.method = method, .rotate = rotate, .factor = &factor},
        workspace.data(), on);
    o.decoded.resize(tokens.size());
    kvarn::decode_tile(kvarn::const_tile_view{o.record.data(), layout},
                       kvarn::tokens_view<float>{o.decoded.data(), layout.head_dim}, rotate, on);
    return o;
  };
  const outcome expected = run(target::scalar);
  const kvarn::const_tile_view tile{expected.record.data(), layout};
  require(kvarn::validate_record(tile, expected.record.size()).ok(), target::scalar,
          "validity of a record");
  for (const target on : kvarn_test::covered_targets()) {
    const outcome got = run(on);
    require(kvarn_test::same_bits(got.upper, expected.upper), on, "the factor");
    require(got.record == expected.record, on, "a record");
    require(got.report.replaced == expected.report.replaced, on, "the report");
    require(kvarn_test::same_bits(got.decoded, expected.decoded), on, "a decoded tile");
  }
}

template <class T>
void attention(choices& c) {
  const auto keys = choose_layout(c, kvarn::tile_kind::key);
  const auto values = choose_layout(c, kvarn::tile_kind::value);
  kvarn_test::shape s;
  s.format = {keys.head_dim, values.head_dim, keys.group, keys.bits, values.bits, keys.scale};
  s.groups = c.below(12);
  s.sink = c.below(140);
  s.tail = c.below(140);
  s.heads = 1 + c.below(9);
  s.tokens = 1 + c.below(3);
  s.ahead = c.below(3) * c.below(200);
  s.strided = c.below(4) == 0;
  const float sizes[] = {2.0f, 0.0f, 0.01f, 40.0f};
  kvarn_test::scene<T> scene(s, static_cast<std::uint64_t>(c.below(30000)), c.of(sizes));
  const auto changed = choose_tokens(c, s.tokens * s.heads, keys.head_dim);
  if (c.below(2) == 0) scene.queries() = changed;
  const auto options = kvarn_test::options_of(scene, c.below(kvarn_test::option_sets));
  const auto expected = kvarn_test::run(scene, options, target::scalar);
  for (const target on : kvarn_test::covered_targets()) {
    const auto got = kvarn_test::run(scene, options, on);
    require(kvarn_test::same_bits(got.out, expected.out), on, "an output");
    require(kvarn_test::same_bits(got.lse, expected.lse), on, "a log-sum-exp");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  choices c(std::span<const std::uint8_t>(data, size));
  switch (c.below(6)) {
    case 0:
      codec<float>(c);
      break;
    case 1:
      codec<kvarn::float16>(c);
      break;
    case 2:
      codec<kvarn::bfloat16>(c);
      break;
    case 3:
      attention<float>(c);
      break;
    case 4:
      attention<kvarn::bfloat16>(c);
      break;
    default:
      attention<kvarn::float16>(c);
      break;
  }
  return 0;
}
