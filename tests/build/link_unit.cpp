// One function, compiled for two instruction sets, that uses the library in its own translation
// unit. LINK_UNIT is its name. What it calls here is what symbols.sh can check: add a call for
// every part of the library that has functions.
#include <cstddef>
#include <cstdint>
#include <kvarn/cache/cache_file.hpp>
#include <kvarn/kvarn.hpp>
#include <span>
#include <sstream>
#include <vector>

std::uint64_t LINK_UNIT();

std::uint64_t LINK_UNIT() {
  std::uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a
  const auto add = [&digest](std::uint64_t value) { digest = (digest ^ value) * 0x100000001b3u; };

  float value = 0x1p-20f;
  for (int i = 0; i < 400; ++i, value *= 1.0625f) {
    add(kvarn::float16(value).bits);
    add(kvarn::ue5m3(value).bits);
    add(kvarn::e4m3(value).bits);
  }

  // One tile each of keys and values by every encoder, their tokens again, and attention to them.
  constexpr kvarn::cache_format format{.key_head_dim = 80, .value_head_dim = 112, .value_bits = 3};
  std::vector<float> tokens(static_cast<std::size_t>(format.group * format.value_head_dim));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<float>(static_cast<int>(i * 7919 % 1021) - 510) * 0x1p-8f;

  kvarn::query_moment moment(format.key_head_dim);
  moment.merge(moment);
  moment.add(kvarn::tokens_view<const float>{tokens.data(), format.key_head_dim}, 20);
  const kvarn::query_factor factor(
      kvarn::query_moment::from_sums(moment.head_dim(), moment.sums(), moment.count()).value());

  std::vector<float> decoded(tokens.size());
  const auto encode = [&](const kvarn::tile_layout& layout, kvarn::encoder method) {
    auto encoder = kvarn::tile_encoder::make(layout, {.method = method, .factor = &factor}).value();
    std::vector<std::byte> record(encoder.record_bytes());
    encoder(kvarn::tokens_view<const float>{tokens.data(), layout.head_dim}, record.data());
    const auto records =
        kvarn::view_tiles(record.data(), record.size(), layout, record.size(), 1).value();
    add(kvarn::validate_record(records[0], record.size()).ok() ? 1 : 0);
    kvarn::decode_tile(records[0], kvarn::tokens_view<float>{decoded.data(), layout.head_dim});
    kvarn::decode_row(records[0], 3, decoded.data());
    for (const float x : decoded) add(kvarn::bits_of(x));
    return record;
  };
  add(kvarn::parse_format_id(format.id()).ok() ? 1 : 0);
  for (const auto& [method, name] : kvarn::encoder_infos) {
    const auto keys = encode(format.key_layout(), method);
    const auto values = encode(format.value_layout(), method);
    const kvarn::sealed_group group{keys.data(), values.data(), 10, format.group};
    const kvarn::exact_tokens<float> sink{
        {tokens.data(), format.key_head_dim}, {tokens.data(), format.value_head_dim}, 0, 10};
    const kvarn::attention_memory<float> memory{format, sink, {&group, 1}, {}};
    std::vector<float> workspace(kvarn::attention_workspace(format));
    float out[format.value_head_dim];
    float lse = 0.0f;
    const float sink_logit = 0.5f;
    kvarn::attend(kvarn::attention_queries<float>{{tokens.data(), format.key_head_dim}, 1, 1, 500},
                  memory,
                  {.softmax_scale = 0.125f, .logit_soft_cap = 9.0f, .sink_logits = &sink_logit},
                  kvarn::tokens_view<float>{out, format.value_head_dim}, &lse, workspace.data());
    for (const float x : out) add(kvarn::bits_of(x));
    add(kvarn::bits_of(lse));
  }

  // A step of two sequences in the cache, and a file.
  kvarn::cache_config config{.layers = 1, .kv_heads = 1, .query_heads = 1, .format = format};
  config.sink = 0;
  config.page_count = 4;
  config.method = kvarn::encoder::query_aware;
  auto cache = kvarn::kv_cache<>::make(config).value();
  kvarn::cache_workspace workspace;
  const kvarn::sequence_id id = cache.create().value();
  const auto keys = kvarn::token_major<const float>(tokens.data(), 1, format.key_head_dim);
  const auto values = kvarn::token_major<const float>(tokens.data(), 1, format.value_head_dim);
  cache.observe(id, 0, keys, 9).or_throw();
  cache.append(id, 0, keys, values, format.group).or_throw();
  cache.commit(id).or_throw();
  add(static_cast<std::uint64_t>(cache.seal(id, 1, workspace).value()));
  cache.append(id, 0, keys, values, 3).or_throw();
  const kvarn::sequence_id fork = cache.fork(id, 100).value();
  cache.truncate(id, format.group).or_throw();
  float out[format.value_head_dim];
  const kvarn::cache_queries<float, float> query{keys,
                                                 kvarn::token_major(out, 1, format.value_head_dim)};
  const kvarn::sequence_id ids[] = {id, fork};
  for (const kvarn::sequence_id each : ids) {
    cache.attend(each, 0, query, {.softmax_scale = 0.125f}, workspace).or_throw();
    for (const float x : out) add(kvarn::bits_of(x));
  }
  const kvarn::cache_queries<float, float> queries[] = {query, query};
  cache
      .attend(ids, 0, std::span<const kvarn::cache_queries<float, float>>(queries),
              {.softmax_scale = 0.125f}, workspace, kvarn::serial_executor{})
      .or_throw();
  for (const float x : out) add(kvarn::bits_of(x));
  std::stringstream file;
  kvarn::save_sequences(cache, ids, file).or_throw();
  kvarn::save_moments(*cache.statistics(id), file).or_throw();
  add(kvarn::restore_sequences(cache, file).value().size());
  const kvarn::query_factors factors(kvarn::load_moments(file).value());
  add(kvarn::bits_of(factors.at(0, 0).upper()[1]));
  cache.drop_oldest(id, 1).or_throw();
  cache.free(id).or_throw();
  add(cache.memory().total());
  return digest;
}
