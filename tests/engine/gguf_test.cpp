// GGUF files: what is written is read, and nothing hostile is believed.
#include "../examples/engine/gguf.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "support/gguf_writer.hpp"

namespace {

using kvarn_engine::ggml_type;
using kvarn_engine::gguf_file;
using kvarn_test::gguf_writer;

std::string bytes_of(std::uint64_t value, std::size_t count) {
  return {reinterpret_cast<const char*>(&value), count};
}

// A bit of everything.
gguf_writer sample() {
  gguf_writer writer;
  writer.add("z.u8", std::uint8_t{200})
      .add("i8", std::int8_t{-100})
      .add("u16", std::uint16_t{60000})
      .add("i16", std::int16_t{-30000})
      .add("u32", std::uint32_t{4000000000u})
      .add("i32", std::int32_t{-2000000000})
      .add("u64", std::uint64_t{1} << 63)
      .add("i64", std::int64_t{-5000000000})
      .add("f32", 0.1f)
      .add("f64", 0.2)
      .add("yes", true)
      .add("no", false)
      .add("text", "some text")
      .add("empty", "")
      .add_array<std::string_view>("words", {"one", "", "three"})
      .add_array<std::int32_t>("numbers", {1, -2, 3})
      .add_array<bool>("flags", {true, false})
      .add_array<float>("none", {})
      .add_tensor("b", ggml_type::f32, {3, 2}, std::string(24, 'b'))
      .add_tensor("a", ggml_type::q8_0, {64, 2, 1, 3}, std::string(2 * 34 * 6, 'a'))
      .add_tensor("c", ggml_type::bf16, {5}, std::string(10, 'c'));
  return writer;
}

std::string error_of(const gguf_writer& writer) {
  const auto file = gguf_file::from_bytes(writer.bytes(), "model.gguf");
  if (file.ok()) return "read";
  EXPECT_EQ(file.why().code(), kvarn::error_code::invalid_data);
  return file.why().message();
}

TEST(Gguf, MetadataOfBothVersions) {
  for (const std::uint32_t version : {2u, 3u}) {
    auto writer = sample();
    writer.version = version;
    const auto file = gguf_file::from_bytes(writer.bytes()).value();
    EXPECT_EQ(file.version(), version);
    EXPECT_EQ(file.get<std::uint8_t>("z.u8").value(), 200);
    EXPECT_EQ(file.get<int>("z.u8").value(), 200);
    EXPECT_EQ(file.get<int>("i8").value(), -100);
    EXPECT_EQ(file.get<std::int64_t>("u16").value(), 60000);
    EXPECT_EQ(file.get<int>("i16").value(), -30000);
    EXPECT_EQ(file.get<std::uint32_t>("u32").value(), 4000000000u);
    EXPECT_EQ(file.get<int>("i32").value(), -2000000000);
    EXPECT_EQ(file.get<std::uint64_t>("u64").value(), std::uint64_t{1} << 63);
    EXPECT_EQ(file.get<std::int64_t>("i64").value(), -5000000000);
    EXPECT_EQ(file.get<float>("f32").value(), 0.1f);
    EXPECT_EQ(file.get<double>("f32").value(), double{0.1f});
    EXPECT_EQ(file.get<double>("f64").value(), 0.2);
    EXPECT_TRUE(file.get<bool>("yes").value());
    EXPECT_FALSE(file.get<bool>("no").value());
    EXPECT_EQ(file.get<std::string_view>("text").value(), "some text");
    EXPECT_EQ(file.get<std::string_view>("empty").value(), "");
    EXPECT_EQ(file.get<std::vector<std::string_view>>("words").value(),
              (std::vector<std::string_view>{"one", "", "three"}));
    EXPECT_EQ(file.get<std::vector<std::int64_t>>("numbers").value(),
              (std::vector<std::int64_t>{1, -2, 3}));
    EXPECT_EQ(file.get<std::vector<bool>>("flags").value(), (std::vector<bool>{true, false}));
    EXPECT_TRUE(file.get<std::vector<float>>("none").value().empty());
    EXPECT_FALSE(file.find<int>("absent").value().has_value());
    EXPECT_FALSE(file.find<int>("").value().has_value());
  }
}

TEST(Gguf, LookupsOfAnotherTypeNameKeyAndTypes) {
  const auto file = gguf_file::from_bytes(sample().bytes(), "model.gguf").value();
  const auto expect = [](const kvarn::status& why, const char* message) {
    EXPECT_EQ(why.code(), kvarn::error_code::invalid_data);
    EXPECT_EQ(why.message(), message);
  };
  expect(file.find<bool>("u32").why(), "model.gguf: 'u32' is of type uint32; wanted: boolean");
  expect(file.find<float>("u32").why(),
         "model.gguf: 'u32' is of type uint32; wanted: floating-point number");
  expect(file.find<int>("f32").why(),
         "model.gguf: 'f32' is of type float32; wanted: integer of 32 bits");
  expect(file.find<int>("yes").why(),
         "model.gguf: 'yes' is of type boolean; wanted: integer of 32 bits");
  expect(file.find<std::string_view>("words").why(),
         "model.gguf: 'words' is an array of string; wanted: string");
  expect(file.find<std::vector<int>>("words").why(),
         "model.gguf: 'words' is an array of string; wanted: array of integer of 32 bits");
  expect(file.find<std::vector<int>>("i32").why(),
         "model.gguf: 'i32' is of type int32; wanted: array of integer of 32 bits");
  expect(file.get<bool>("absent").why(), "model.gguf: no metadata 'absent'; wanted: boolean");
}

TEST(Gguf, IntegersThatDoNotFitAreErrors) {
  const auto file = gguf_file::from_bytes(sample().bytes(), "model.gguf").value();
  EXPECT_EQ(file.find<std::int8_t>("z.u8").why().message(),
            "model.gguf: 'z.u8' has the value 200; wanted: integer of 8 bits");
  EXPECT_EQ(file.find<std::int64_t>("u64").why().message(),
            "model.gguf: 'u64' has the value 9223372036854775808; wanted: integer of 64 bits");
  EXPECT_EQ(file.find<std::uint64_t>("i8").why().message(),
            "model.gguf: 'i8' has the value -100; wanted: non-negative integer of 64 bits");
  EXPECT_EQ(file.find<std::vector<std::uint32_t>>("numbers").why().message(),
            "model.gguf: 'numbers' has the value -2; wanted: array of non-negative integer of 32 "
            "bits");
}

TEST(Gguf, Tensors) {
  auto writer = sample();
  const auto file = gguf_file::from_bytes(writer.bytes(), "model.gguf").value();
  ASSERT_EQ(file.tensors().size(), 3u);
  const auto a = file.get_tensor("a").value();
  EXPECT_EQ(a.type, ggml_type::q8_0);
  EXPECT_EQ(a.dimensions, 4);
  EXPECT_EQ(a.cols(), 64u);
  EXPECT_EQ(a.rows(), 6u);
  EXPECT_EQ(a.row_bytes(), 68u);
  EXPECT_EQ(a.bytes.size(), 408u);
  EXPECT_EQ(a.bytes.front(), std::byte{'a'});
  EXPECT_EQ(a.bytes.back(), std::byte{'a'});
  const auto b = file.get_tensor("b").value();
  EXPECT_EQ(b.extents, (std::array<std::uint64_t, 4>{3, 2, 1, 1}));
  EXPECT_EQ(b.bytes.size(), 24u);
  EXPECT_EQ(b.bytes.back(), std::byte{'b'});
  EXPECT_EQ(file.get_tensor("c").value().rows(), 1u);
  EXPECT_EQ(file.find_tensor("d"), nullptr);
  EXPECT_EQ(file.get_tensor("d").why().message(), "model.gguf: no tensor 'd'");
}

TEST(Gguf, AlignmentIsRead) {
  gguf_writer writer;
  writer.alignment = 256;
  writer.add("general.alignment", std::uint32_t{256})
      .add_tensor("a", ggml_type::f32, {1}, "aaaa")
      .add_tensor("b", ggml_type::f32, {1}, "bbbb");
  const auto file = gguf_file::from_bytes(writer.bytes()).value();
  EXPECT_EQ(file.get_tensor("b").value().bytes[0], std::byte{'b'});
}

TEST(Gguf, FilesAreMapped) {
  const auto path = std::filesystem::path(testing::TempDir()) / "kvarn_gguf_test.gguf";
  const auto bytes = sample().bytes();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  std::optional<gguf_file> copy;
  {
    const auto file = gguf_file::open(path.string()).value();
    copy = file;
  }
  EXPECT_EQ(copy->name(), path.string());
  EXPECT_EQ(copy->get<std::string_view>("text").value(), "some text");
  EXPECT_EQ(copy->get_tensor("c").value().bytes.back(), std::byte{'c'});
  const std::string text = kvarn_engine::read_text(path.string()).value();
  EXPECT_EQ(text, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));

  std::ofstream(path, std::ios::binary | std::ios::trunc).close();
  const auto empty = gguf_file::open(path.string());
  EXPECT_NE(empty.why().message().find("ends within the signature"), std::string::npos);
  EXPECT_EQ(kvarn_engine::read_text(path.string()).value(), "");
  std::filesystem::remove(path);
  const auto absent = gguf_file::open(path.string());
  EXPECT_EQ(absent.why().code(), kvarn::error_code::invalid_argument);
  EXPECT_EQ(absent.why().message(),
            path.string() + ": cannot be opened: No such file or directory");
  EXPECT_EQ(gguf_file::open("/").why().message(), "/: is not a regular file");
  EXPECT_EQ(kvarn_engine::read_text("/").why().message(), "/: is not a regular file");
}

TEST(Gguf, NamesInMessagesArePrintable) {
  const auto shown = [](std::string_view text) { return kvarn_engine::detail::quoted(text); };
  EXPECT_EQ(shown("caf\u00e9"), "'caf\u00e9'");
  EXPECT_EQ(shown(std::string_view("a\0\n\x7f\xff\xc3", 6)), "'a" + std::string(5, '?') + "'");
  const std::string name(79, 'x');
  EXPECT_EQ(shown(name + "\u00e9"), "'" + name + "?...'");  // cut within a character
}

TEST(Gguf, EveryTruncationIsRefused) {
  const auto bytes = sample().bytes();
  ASSERT_TRUE(gguf_file::from_bytes(bytes).ok());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const auto end = bytes.begin() + static_cast<std::ptrdiff_t>(size);
    const auto file = gguf_file::from_bytes({bytes.begin(), end});
    EXPECT_EQ(file.why().code(), kvarn::error_code::invalid_data) << size;
  }
}

// No crash (under the sanitizers: no access out of bounds), and views inside of the file.
TEST(Gguf, DamagedBytesDoNoHarm) {
  const auto bytes = sample().bytes();
  std::mt19937 random(1);
  int readable = 0;
  for (int round = 0; round < 20000; ++round) {
    auto damaged = bytes;
    for (auto i = random() % 3; i < 3; ++i)
      damaged[random() % damaged.size()] =
          static_cast<std::byte>(random() % 4 == 0 ? 255 : random());
    const auto file = gguf_file::from_bytes(damaged);
    if (!file.ok()) {
      EXPECT_FALSE(file.why().message().empty());
      continue;
    }
    ++readable;
    std::size_t total = 0;
    for (const auto& tensor : file.value().tensors()) total += tensor.bytes.size();
    EXPECT_LE(total, bytes.size());
    (void)file.value().find<std::vector<std::string_view>>("words");
    (void)file.value().find<std::string_view>("text");
  }
  EXPECT_GT(readable, 1000);
  EXPECT_LT(readable, 19000);
}

TEST(Gguf, HeaderIsChecked) {
  gguf_writer writer;
  writer.version = 1;
  EXPECT_EQ(error_of(writer), "model.gguf: is of GGUF version 1; 2 and 3 are read");
  writer.version = 4;
  EXPECT_EQ(error_of(writer), "model.gguf: is of GGUF version 4; 2 and 3 are read");
  writer.version = 0x03000000;
  EXPECT_EQ(error_of(writer), "model.gguf: is big endian; little-endian files are read");
  auto bytes = gguf_writer().bytes();
  EXPECT_TRUE(gguf_file::from_bytes(bytes).ok());
  bytes[0] = std::byte{'g'};
  EXPECT_EQ(gguf_file::from_bytes(bytes, "x").why().message(),
            "x: does not start with the signature GGUF");
}

TEST(Gguf, CountsBeyondTheFileAreRefused) {
  for (const std::size_t at : {8u, 16u})
    for (const std::uint64_t count :
         {std::uint64_t{3}, std::uint64_t{1} << 32, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
      auto bytes = gguf_writer().bytes();
      std::memcpy(bytes.data() + at, &count, sizeof count);
      const auto why = gguf_file::from_bytes(bytes, "x").why();
      EXPECT_EQ(why.message().rfind(std::string("x: the number of ") +
                                        (at == 8 ? "tensors" : "metadata keys") + " is " +
                                        std::to_string(count),
                                    0),
                0u)
          << why.message();
    }
}

TEST(Gguf, MetadataIsChecked) {
  const auto starts = [](const gguf_writer& writer, const std::string& message) {
    EXPECT_EQ(error_of(writer).substr(0, message.size()), message);
  };
  for (const std::uint64_t length :
       {std::uint64_t{1000}, std::uint64_t{1} << 63, ~std::uint64_t{0}})
    starts(gguf_writer().add_raw("k", 8, bytes_of(length, 8)),
           "model.gguf: ends within metadata 'k': " + std::to_string(length) + " bytes needed");
  starts(gguf_writer().add("k", 1).add("j", 2).add("k", 1),
         "model.gguf: metadata key 'k' stands there twice");
  starts(gguf_writer().add_raw("k", 13, "xxxxxxxx"),
         "model.gguf: metadata 'k' has type 13; types 0 to 12 are known");
  starts(gguf_writer().add_raw("k", 0xffffffff, "xxxxxxxx"),
         "model.gguf: metadata 'k' has type 4294967295; types 0 to 12 are known");
  starts(gguf_writer().add_raw("k", 7, "\x02"),
         "model.gguf: metadata 'k' has a boolean of 2; 0 and 1 are allowed");
  starts(gguf_writer().add_raw("k", 9, bytes_of(9, 4) + bytes_of(1, 8) + std::string(40, '\0')),
         "model.gguf: metadata 'k' is an array of arrays, which is not read");
  starts(gguf_writer().add_raw("k", 9, bytes_of(77, 4) + bytes_of(1, 8)),
         "model.gguf: the elements of metadata 'k' has type 77");
  for (const std::uint64_t count : {std::uint64_t{1000}, std::uint64_t{1} << 62, ~std::uint64_t{0}})
    for (const std::uint64_t type : {0u, 8u, 10u})
      starts(gguf_writer().add_raw("k", 9, bytes_of(type, 4) + bytes_of(count, 8)),
             "model.gguf: the number of elements of metadata 'k' is " + std::to_string(count));
  starts(gguf_writer().add(std::string(65536, 'k'), 1),
         "model.gguf: metadata key 0 has 65536 bytes; at most 65535 are allowed");
  for (const std::uint32_t alignment : {0u, 4u, 24u, 0xffffffffu})
    starts(gguf_writer().add("general.alignment", alignment),
           "model.gguf: general.alignment is " + std::to_string(alignment));
  starts(gguf_writer().add("general.alignment", "32"),
         "model.gguf: 'general.alignment' is of type string");
}

TEST(Gguf, TensorsAreChecked) {
  const auto starts = [](const std::vector<std::uint64_t>& extents, ggml_type type,
                         std::uint64_t offset, const std::string& message) {
    gguf_writer writer;
    writer.add_tensor("data", ggml_type::f32, {64}, std::string(256, 'x'))
        .add_tensor_at("t", type, extents, offset);
    const std::string wanted = "model.gguf: tensor 't' " + message;
    EXPECT_EQ(error_of(writer).substr(0, wanted.size()), wanted);
  };
  constexpr auto f32 = ggml_type::f32;
  starts({}, f32, 0, "has 0 dimensions; 1 to 4 are allowed");
  starts({1, 1, 1, 1, 1}, f32, 0, "has 5 dimensions; 1 to 4 are allowed");
  starts({0}, f32, 0, "has an extent of 0");
  starts({4, 0}, f32, 0, "has an extent of 0");
  // A product of extents that overflows, with and without an extent of 0 behind.
  const std::uint64_t large = std::uint64_t{1} << 32;
  starts({large, large}, f32, 0, "has more elements than");
  starts({large, large, large, large}, f32, 0, "has more elements than");
  starts({large, large, 0}, f32, 0, "has an extent of 0");
  starts({~std::uint64_t{0}}, f32, 0, "has more elements than");
  starts({(std::uint64_t{1} << 62) + 1}, f32, 0, "has more elements than");
  starts({33}, ggml_type::q4_0, 0, "has rows of 33; blocks of Q4_0 have 32");
  starts({32}, ggml_type::q6_k, 0, "has rows of 32; blocks of Q6_K have 256");
  starts({4}, static_cast<ggml_type>(4), 0, "has the unknown type 4");
  starts({4}, static_cast<ggml_type>(999), 0, "has the unknown type 999");
  starts({4}, f32, 16, "is at offset 16; multiples of 32 are allowed");
  starts({4}, f32, 256, "of 16 bytes at offset 256 ends beyond the 256 bytes of data");
  starts({4}, f32, ~std::uint64_t{31}, "of 16 bytes at offset 18446744073709551584 ends beyond");

  gguf_writer twice;
  twice.add_tensor("t", f32, {1}, "xxxx").add_tensor("t", f32, {1}, "xxxx");
  EXPECT_EQ(error_of(twice), "model.gguf: tensor 't' stands there twice");
  gguf_writer overlap;
  overlap.add_tensor("t", f32, {16}, std::string(64, 'x')).add_tensor_at("u", f32, {1}, 32);
  EXPECT_EQ(error_of(overlap), "model.gguf: tensors 't' and 'u' overlap");
}

TEST(Gguf, NamesInMessagesAreShortAndPrintable) {
  gguf_writer writer;
  writer.add_raw("\x1b[2J" + std::string(1000, 'k'), 13, "");
  EXPECT_EQ(error_of(writer), "model.gguf: metadata '?[2J" + std::string(76, 'k') +
                                  "...' has type 13; types 0 to 12 are known");
}

}  // namespace
