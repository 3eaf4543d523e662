// Files: what was saved comes back byte by byte, anything else is refused and changes nothing.
#include "kvarn/cache/cache_file.hpp"

#include <gtest/gtest.h>

#include <memory_resource>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "file_walker.hpp"
#include "support.hpp"

namespace {

using kvarn::error_code;
using kvarn_test::counting_resource;
using kvarn_test::file_walker;
using kvarn_test::seeds;
using kvarn_test::small_config;
using kvarn_test::test_cache;

const kvarn::layer_bits mixed_bits[] = {{2, 4}, kvarn::exact_layer};

kvarn::cache_config file_config() {
  auto config = small_config();
  config.bits = mixed_bits;
  config.method = kvarn::encoder::query_aware;
  return config;
}

// Forks that share a page, a cut tile, a shifted sequence, a draft, one inside the sink, moments.
std::vector<kvarn::sequence_id> fill(test_cache<>& c) {
  const auto a = c.create();
  const auto queries = kvarn_test::token_tensor(seeds(0, 20), 0, 4, 3, 64);
  EXPECT_TRUE(c.cache.observe(a, 0, kvarn::token_major(queries.data(), 4, 64), 20).ok());
  c.append(a, seeds(0, 5 + 64 * 2 + 9));
  c.seal(a);
  const auto cut = c.cache.fork(a, 5 + 64 + 20).value();
  c.append(cut, seeds(300, 5));
  const auto shifted = c.create();
  c.append(shifted, seeds(1000, 5 + 64 * 2 + 3));
  c.seal(shifted);
  EXPECT_TRUE(c.cache.drop_oldest(shifted, 1).ok());
  c.draft(shifted, seeds(2000, 4));
  const auto little = c.create();
  c.append(little, seeds(3000, 3));
  return {a, cut, shifted, little, c.create()};
}

std::string save(const test_cache<>& c, const std::vector<kvarn::sequence_id>& ids) {
  std::stringstream file;
  EXPECT_TRUE(kvarn::save_sequences(c.cache, ids, file).ok());
  return file.str();
}

kvarn::result<std::vector<kvarn::sequence_id>> restore(test_cache<>& c, const std::string& bytes) {
  std::stringstream stream(bytes);
  return kvarn::restore_sequences(c.cache, stream);
}

TEST(CacheFile, RestoredSequencesContinueAsTheSaved) {
  test_cache<> source(file_config());
  auto ids = fill(source);
  const auto file = save(source, ids);
  EXPECT_TRUE(source.cache.truncate(ids[2], source.cache.length(ids[2])).ok());

  test_cache<> target(file_config());
  const auto restored = restore(target, file).value();
  ASSERT_EQ(restored.size(), ids.size());
  EXPECT_EQ(target.cache.free_pages(), 16 - 3) << "shared pages stay shared";
  EXPECT_EQ(save(target, restored), file);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(source.bytes(ids[i]), target.bytes(restored[i])) << i;
    EXPECT_EQ(source.cache.length(ids[i]), target.cache.length(restored[i]));
    source.append(ids[i], seeds(7000 + i, 70));
    target.append(restored[i], seeds(7000 + i, 70));
    source.seal(ids[i]);
    target.seal(restored[i]);
    EXPECT_EQ(source.bytes(ids[i]), target.bytes(restored[i])) << i;
    EXPECT_EQ(source.attend(ids[i], 1), target.attend(restored[i], 1));
  }
}

TEST(CacheFile, OtherTypesOfExactRows) {
  const auto check = [](auto cache) {
    const auto id = cache.create();
    cache.append(id, seeds(0, 100));
    cache.seal(id);
    std::stringstream file;
    ASSERT_TRUE(kvarn::save_sequences(cache.cache, std::span(&id, 1), file).ok());
    file_walker walker(file.str());
    const auto restored = kvarn::restore_sequences(cache.cache, file).value();
    EXPECT_EQ(cache.bytes(id), cache.bytes(restored[0]));
    test_cache<kvarn::float16> other(small_config());
    std::stringstream again(walker.file);
    EXPECT_EQ(kvarn::restore_sequences(other.cache, again).why().code(),
              error_code::invalid_format);
  };
  check(test_cache<float>(small_config()));
  check(test_cache<kvarn::bfloat16>(small_config()));
}

TEST(CacheFile, WhatFollowsInTheStreamStays) {
  test_cache<> c(file_config());
  const auto ids = fill(c);
  std::stringstream stream;
  stream << "before";
  ASSERT_TRUE(kvarn::save_sequences(c.cache, std::span(ids).first(1), stream).ok());
  stream << "after";
  std::string text(6, ' ');
  stream.read(text.data(), 6);
  ASSERT_TRUE(kvarn::restore_sequences(c.cache, stream).ok());
  stream >> text;
  EXPECT_EQ(text, "after");
}

TEST(CacheFile, ThePageDescribesEveryByte) {
  test_cache<> c(file_config());
  const file_walker walker(save(c, fill(c)));  // reads by the tables of the page
  EXPECT_EQ(walker.sections.size(), 1u + 3 + 5 * 3 + 2);
  EXPECT_EQ(walker.file.substr(0, 8), "KVNCACHE");
  EXPECT_EQ(walker.header.size(), sizeof(kvarn::cache_file_header));
  EXPECT_EQ(walker.sequence.size(), sizeof(kvarn::sequence_file_header));
  EXPECT_EQ(walker.entry.size(), sizeof(kvarn::sealed_page));
  const kvarn_test::field_table moments("## Calibration files");
  EXPECT_EQ(moments.size(), sizeof(kvarn::moments_file_header));
  std::stringstream calibration;
  ASSERT_TRUE(kvarn::save_moments(kvarn::query_moments(3, 2, 64), calibration).ok());
  EXPECT_EQ(calibration.str().substr(0, 8), "KVNMOMNT");
  EXPECT_EQ(calibration.str().size(), moments.size() + 8 + 3 * 2 * (8 + 4 * 64 * 64) + 8);
  EXPECT_EQ(calibration.str()[moments.at("layers").offset], 3);
  EXPECT_EQ(calibration.str()[moments.at("KV heads").offset], 2);
  EXPECT_EQ(calibration.str()[moments.at("head dim").offset], 64);
  for (const auto* table : {&walker.header, &walker.sequence, &walker.entry, &moments}) {
    std::size_t next = 0;
    for (const auto& field : table->fields) {
      EXPECT_EQ(field.offset, next);
      next += field.bytes;
    }
  }
}

// A cache that has something already, and what it must still be after a refused file.
class CacheFileHostile : public ::testing::Test {
 protected:
  CacheFileHostile() : source(file_config()), walker(save(source, fill(source))) {
    auto config = file_config();
    config.memory = &resource;
    target.emplace(config);
    id = target->create();
    target->append(id, seeds(0, 80));
    target->seal(id);
    bytes = target->bytes(id);
    before = target->cache.memory();
  }

  void expect_refused(const std::string& file, const std::string& message = "") {
    resource.peak = resource.bytes;
    const auto restored = restore(*target, file);
    ASSERT_FALSE(restored.ok());
    EXPECT_NE(restored.why().message().find(message), std::string::npos)
        << restored.why().message() << "\nand not: " << message;
    EXPECT_EQ(target->cache.memory().exact, before.exact);
    EXPECT_EQ(target->cache.memory().statistics, before.statistics);
    EXPECT_EQ(target->cache.free_pages(), 15);
    EXPECT_EQ(target->cache.table().free_sequence_count(), 7);
    EXPECT_EQ(target->bytes(id), bytes);
    EXPECT_LE(resource.peak, before.total() + file.size() + 2048);
  }

  counting_resource resource;
  test_cache<> source;
  file_walker walker;
  std::optional<test_cache<>> target;
  kvarn::sequence_id id;
  std::vector<std::byte> bytes;
  kvarn::memory_use before;
};

TEST_F(CacheFileHostile, TruncatedAnywhere) {
  for (std::size_t size = 0; size < walker.file.size(); size += size < 400 ? 1 : 1009)
    expect_refused(walker.file.substr(0, size));
  for (const auto& s : walker.sections)
    for (const std::size_t size : {s.begin, s.begin + 1, s.end, s.end + 7})
      expect_refused(walker.file.substr(0, size));
}

TEST_F(CacheFileHostile, FlippedBits) {
  for (std::size_t i = 0; i < walker.file.size(); i += i < 400 ? 1 : 503) {
    auto file = walker.file;
    file[i] = static_cast<char>(file[i] ^ (1 << (i % 8)));
    expect_refused(file);
  }
}

TEST_F(CacheFileHostile, CountsAndNumbersWithChecksumsThatFit) {
  const auto& header = walker.find("header");
  const auto& sequence = walker.find("sequence");
  const auto& page = walker.find("page");
  const auto in_header = [&](const char* name, std::uint64_t value, const std::string& message) {
    expect_refused(walker.changed(header, walker.header.at(name), value), message);
  };
  in_header("magic", 0, "it does not start as one");
  in_header("version", 2, "version is 2; the cache has 1");
  in_header("exact type", 0, "exact rows are float; those of the cache are float16");
  in_header("layers", 0xffffffff, "number of layers is 4294967295; the cache has 2");
  in_header("KV heads", 1, "number of KV heads is 1; the cache has 2");
  in_header("key head dim", 128, "key head_dim is 128; the cache has 64");
  in_header("value head dim", 0, "value head_dim is 0; the cache has 64");
  in_header("group", 128, "group is 128; the cache has 64");
  in_header("sink", 6, "sink is 6; the cache has 5");
  in_header("pages", 0xffffffff, "4294967295 x");
  in_header("pages", 4, "it is damaged: the checksum of the");
  in_header("sequences", 0xffffffff, "4294967295 x 24 bytes are needed");
  in_header("sequences", 6, "it ends within the sequence: 24 bytes are needed; 0 are left");
  in_header("sequences", 1, "a page belongs to no sequence");
  in_header("exact type", 7, "exact rows are unknown; those of the cache are float16");
  const auto in_format = [&](const kvarn::cache_format& format, const std::string& message) {
    expect_refused(walker.changed(header, {walker.header.size(), 8}, format.id()),
                   "layer 0: " + message);
  };
  kvarn::cache_format format = file_config().format;
  format.key_bits = 3;
  in_format(format, "key bits is 3; the cache has 2");
  format.key_bits = 2;
  format.value_bits = 2;
  in_format(format, "value bits is 2; the cache has 4");
  format.value_bits = 4;
  format.scale = kvarn::scale_type::e4m3;
  in_format(format, "scale type (0: UE5M3, 1: E4M3) is 1; the cache has 0");
  in_format({}, "key head_dim is 128; the cache has 64");
  expect_refused(walker.changed(header, {walker.header.size(), 8}, 0),
                 "layer 0: it is exact; in the cache it is packed");
  expect_refused(walker.changed(header, {walker.header.size() + 8, 8}, format.id()),
                 "layer 1: it is packed; in the cache it is exact");

  const auto in_sequence = [&](const char* name, std::uint64_t value, const std::string& message) {
    expect_refused(walker.changed(sequence, walker.sequence.at(name), value), message);
  };
  in_sequence("length", ~std::uint64_t{0},
              "sequence 0: its length is 18446744073709551615; allowed are 0 to "
              "4611686018427387904");
  in_sequence("length", (std::uint64_t{1} << 62) + 1, "its length is 4611686018427387905");
  for (const int bits : {31, 40, 62})
    in_sequence("length", std::uint64_t{1} << bits,
                "sequence 0: a layer has " + std::to_string((std::uint64_t{1} << bits) - 5) +
                    " exact tokens behind the sink; allowed are 0 to 1073741823");
  in_sequence("length", std::uint64_t{1} << 29, " x 512 bytes are needed");
  in_sequence("length", 5 + 64 * 2 - 1, "its pages end at position 133, its length is 132");
  in_sequence("first", 4, "its first position behind the sink is 4; allowed are 5 to 142");
  in_sequence("first", 1 << 20, "behind the sink is 1048576; allowed are 5 to 142");
  in_sequence("first", ~std::uint64_t{0}, "is 18446744073709551615; allowed are 5 to 142");
  in_sequence("first", 6, "the position of entry 0 is 5; it must be 6");
  in_sequence("pages", 0xffffffff, "4294967295 x 16 bytes are needed");
  in_sequence("has moments", 2, "has moments is 2; allowed are 0 and 1");

  const auto in_entry = [&](const char* name, std::uint64_t value, const std::string& message,
                            std::size_t entry = 0) {
    auto field = walker.entry.at(name);
    field.offset += walker.sequence.size() + entry * walker.entry.size();
    expect_refused(walker.changed(sequence, field, value), "sequence 0: " + message);
  };
  in_entry("position", 6, "the position of entry 0 is 6; it must be 5");
  in_entry("position", ~std::uint64_t{0}, "the position of entry 0 is -1; it must be 5");
  in_entry("page", 3, "the page of entry 0 is 3; the file has 3");
  in_entry("page", 0xffffffff, "the page of entry 0 is -1; the file has 3");
  in_entry("page", 0, "the page of entry 1 is 0, as that of an entry before", 1);
  in_entry("count", 0, "the count of entry 0 is 0; allowed are 1 to 64");
  in_entry("count", 65, "the count of entry 0 is 65; allowed are 1 to 64");
  in_entry("count", 0x80000000, "the count of entry 0 is -2147483648; allowed are 1 to 64");

  const auto layout =
      kvarn::parse_format_id(walker.number(walker.header.size(), 8)).value().key_layout();
  expect_refused(walker.changed(page, {layout.scale_offset() + 3, 1}, 0xff),
                 "scale 3 has bits 255");
  expect_refused(walker.changed(page, {layout.zero_offset() + 2, 2}, 0x7c00), "zero 1 has bits");
  expect_refused(walker.changed(walker.find("exact rows"), {128, 2}, 0x7e00),
                 "an exact row is not finite");
  expect_refused(walker.changed(walker.find("query moments"), {8, 4}, 0x7f800000),
                 "query moment sum 0 is not finite");
}

// The last position that a query may have is the last of a sequence too.
TEST(CacheFile, PositionsEnd) {
  test_cache<> c(small_config());
  const auto id = c.create();
  c.append(id, seeds(0, 5));
  // A sequence that was shifted so far: its sink, and nothing behind it.
  const auto length = static_cast<std::uint64_t>(kvarn::max_position) - 3;
  std::string file = save(c, {id});
  for (const char* field : {"first", "length"}) {
    const file_walker walker(file);
    file = walker.changed(walker.find("sequence"), walker.sequence.at(field), length);
  }
  const auto far = restore(c, file).value()[0];
  EXPECT_EQ(c.cache.length(far), kvarn::max_position - 3);
  EXPECT_EQ(c.cache.sealable(far, kvarn::max_position), kvarn::max_position / 64);
  const auto tokens = kvarn_test::token_tensor(seeds(0, 4), 0, 2, 0, 64);
  const auto view = kvarn::token_major(tokens.data(), 2, 64);
  EXPECT_EQ(c.cache.append(far, 0, view, view, 4).message(),
            "tokens is 4; allowed are 0 to 3: a tail has at most 1073741823, a sequence "
            "4611686018427387904");
  c.append(far, seeds(5, 3));
  EXPECT_EQ(c.cache.length(far), kvarn::max_position);
  for (int layer = 0; layer < 2; ++layer) EXPECT_LT(c.error(far, layer), 1e-3);
  EXPECT_EQ(c.cache.append(far, 0, view, view, 1).code(), error_code::invalid_argument);
  EXPECT_EQ(c.cache.length(c.cache.fork(far).value()), kvarn::max_position);
}

TEST_F(CacheFileHostile, WithoutRoom) {
  for (int i = 0; i < 3; ++i) (void)target->create();
  EXPECT_EQ(restore(*target, walker.file).why().message(),
            "cache file: 5 sequences are saved; 4 can be created");
  auto config = file_config();
  config.page_count = 2;
  test_cache<> few_pages(config);
  EXPECT_EQ(restore(few_pages, walker.file).why().message(),
            "cache file: 3 pages are needed; 2 are free");
  EXPECT_EQ(few_pages.cache.free_pages(), 2);
  config = file_config();
  config.exact_memory = 20000;
  test_cache<> few_rows(config);
  const auto refused = restore(few_rows, walker.file).why();
  EXPECT_EQ(refused.code(), error_code::short_buffer);
  EXPECT_NE(refused.message().find(" bytes; exact rows take "), std::string::npos);
  EXPECT_NE(refused.message().find(" of the 20000 bytes of exact_memory"), std::string::npos)
      << refused.message();
  EXPECT_EQ(few_rows.cache.memory().exact, 0u);
  EXPECT_EQ(few_rows.cache.free_pages(), 16);
}

TEST(CacheFile, StreamsThatCannotBeUsed) {
  class pipe : public std::stringbuf {
    pos_type seekoff(off_type, std::ios_base::seekdir, std::ios_base::openmode) override {
      return pos_type(off_type(-1));
    }
  };
  test_cache<> c(small_config());
  pipe buffer;
  std::iostream stream(&buffer);
  EXPECT_EQ(kvarn::restore_sequences(c.cache, stream).why().message(),
            "cache file: the stream cannot be read, or cannot tell its size");
  stream.setstate(std::ios::badbit);
  EXPECT_EQ(kvarn::save_sequences(c.cache, {}, stream).message(),
            "the stream cannot be written to");
  const kvarn::sequence_id none[1];
  std::stringstream good;
  EXPECT_EQ(kvarn::save_sequences(c.cache, none, good).message(),
            "sequence 0 of those to save does not exist");
  EXPECT_TRUE(good.str().empty());
}

TEST(CacheFile, ChecksumIsXxh64) {
  const std::string text = "Nobody inspects the spammish repetition";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    kvarn::checksum sum;
    sum.add(text.data(), cut);
    sum.add(text.data() + cut, text.size() - cut);
    EXPECT_EQ(sum.value(), 0xfbcea83c8a378bf1u);
  }
  kvarn::checksum sum;
  EXPECT_EQ(sum.value(), 0xef46db3751d8e999u);
  sum.add("abc", 3);
  EXPECT_EQ(sum.value(), 0x44bc2cf5ad770999u);
}

}  // namespace
