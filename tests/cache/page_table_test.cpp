// The bookkeeping alone: extents, flat arrays of a batch, reference counts.
#include "kvarn/cache/page_table.hpp"

#include <gtest/gtest.h>

#include <memory_resource>
#include <type_traits>
#include <vector>

#include "support.hpp"

namespace {

using kvarn::page_table;
using kvarn::sequence_extent;
using kvarn_test::small_config;

// Flat arrays that can be copied to a device.
static_assert(std::is_trivially_copyable_v<kvarn::sealed_page> && sizeof(kvarn::sealed_page) == 16);
static_assert(std::is_trivially_copyable_v<sequence_extent> && sizeof(sequence_extent) == 32);

// Appends, commits and seals without any storage.
void feed(page_table& table, kvarn::sequence_id id, int tokens) {
  for (int layer = 0; layer < table.layers(); ++layer) table.append(id, layer, tokens);
  table.commit(id, tokens);
  std::vector<std::int32_t> pages(static_cast<std::size_t>(table.sealable(id)));
  table.reserve(id, pages.size());
  ASSERT_TRUE(table.claim(pages));
  for (const auto page : pages) table.publish(id, page);
}

TEST(PageTable, FlatArraysOfABatch) {
  auto config = small_config();
  const kvarn::layer_bits bits[] = {{2, 2}, kvarn::exact_layer};
  config.bits = bits;
  page_table table(config, std::pmr::get_default_resource());
  const auto a = table.create().value();
  const auto b = table.create().value();
  const auto c = table.create().value();
  feed(table, a, 5 + 64 * 2 + 7);
  feed(table, b, 3);
  feed(table, c, 5 + 64);
  table.append(c, 0, 2);  // a draft
  const kvarn::sequence_id ids[] = {c, b, a};
  std::vector<sequence_extent> extents;
  std::vector<kvarn::sealed_page> pages;
  table.flatten(ids, 0, extents, pages);
  const std::vector<sequence_extent> expected{
      {71, 69, 5, 2, 0, 1}, {3, 5, 3, 0, 1, 0}, {140, 133, 5, 7, 1, 2}};
  EXPECT_EQ(extents, expected);
  const std::vector<kvarn::sealed_page> expected_pages{{5, 2, 64}, {5, 0, 64}, {69, 1, 64}};
  EXPECT_EQ(pages, expected_pages);
  table.flatten(ids, 1, extents, pages);
  const std::vector<sequence_extent> exact{
      {69, 5, 5, 64, 0, 0}, {3, 5, 3, 0, 0, 0}, {140, 5, 5, 135, 0, 0}};
  EXPECT_EQ(extents, exact);
  EXPECT_TRUE(pages.empty());
}

TEST(PageTable, ACutPageCountsInOneSequenceOnly) {
  page_table table(small_config(), std::pmr::get_default_resource());
  const auto parent = table.create().value();
  feed(table, parent, 5 + 128);
  const auto child = table.fork(parent, 5 + 64 + 10).value();
  ASSERT_EQ(table.pages(child).size(), 2u);
  EXPECT_EQ(table.pages(child)[1].count, 10);
  EXPECT_EQ(table.pages(parent)[1].count, 64);
  EXPECT_EQ(table.pages(child)[1].page, table.pages(parent)[1].page);
  EXPECT_EQ(table.references(table.pages(child)[1].page), 2);
  table.truncate(child, 5 + 64);  // where a page starts, it goes
  EXPECT_EQ(table.pages(child).size(), 1u);
  EXPECT_EQ(table.references(table.pages(parent)[1].page), 1);
  table.free(parent);
  EXPECT_EQ(table.free_page_count(), 15);
  table.free(child);
  EXPECT_EQ(table.free_page_count(), 16);
}

TEST(PageTable, TruncationIntoAShiftedGap) {
  page_table table(small_config(), std::pmr::get_default_resource());
  const auto id = table.create().value();
  feed(table, id, 5 + 64 * 3);
  EXPECT_EQ(table.drop_oldest(id, 2), 128);
  EXPECT_EQ(table.first(id), 133);
  table.truncate(id, 50);
  EXPECT_EQ(table.first(id), 50);
  EXPECT_EQ(table.extent(id, 0), (sequence_extent{50, 50, 5, 0, 0, 0}));
  table.truncate(id, 2);
  EXPECT_EQ(table.first(id), 5);
}

TEST(PageTable, SlotsRunOut) {
  auto config = small_config();
  config.max_sequences = 2;
  page_table table(config, std::pmr::get_default_resource());
  const auto a = table.create().value();
  ASSERT_TRUE(table.create().ok());
  EXPECT_EQ(table.create().why().message(),
            "all 2 sequences exist already; max_sequences sets the limit");
  EXPECT_FALSE(table.fork(a, 0).ok());
  table.free(a);
  EXPECT_EQ(table.create().value(), (kvarn::sequence_id{a.slot, a.generation + 1}));
}

}  // namespace
