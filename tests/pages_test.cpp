// README.md, CONTRIBUTING.md and docs/ say what is so: snippets, tables, links and file names.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../examples/demo/evaluate.hpp"
#include "../examples/demo/heads.hpp"
#include "../examples/demo/methods.hpp"
#include "kvarn/codec/encoder.hpp"

namespace {

const std::filesystem::path root = std::filesystem::path(KVARN_TEST_DATA_DIR) / ".." / "..";

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

// The text of every ``` block of a page that is marked with `language`.
std::vector<std::string> blocks_of(const std::string& page, const std::string& language) {
  std::vector<std::string> blocks;
  const std::string fence = "\n```" + language + "\n";
  for (std::size_t at = page.find(fence); at != std::string::npos; at = page.find(fence, at)) {
    at += fence.size();
    const std::size_t end = page.find("```\n", at);
    EXPECT_NE(end, std::string::npos);
    blocks.push_back(page.substr(at, end - at));
  }
  return blocks;
}

// A page without its ``` blocks.
std::string prose_of(const std::string& page) {
  std::string prose;
  std::stringstream lines(page);
  bool in_block = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("```", 0) == 0)
      in_block = !in_block;
    else if (!in_block)
      prose += line + "\n";
  }
  return prose;
}

// What stands between ` and ` in a line and looks like a path of this project.
std::set<std::string> paths_of(const std::string& prose) {
  std::set<std::string> paths;
  std::stringstream lines(prose);
  for (std::string line; std::getline(lines, line);) {
    for (std::size_t at = line.find('`'); at != std::string::npos;) {
      const std::size_t end = line.find('`', at + 1);
      if (end == std::string::npos) break;
      const std::string word = line.substr(at + 1, end - at - 1);
      const bool plain = word.find_first_of(" *<>(){}$=\"") == std::string::npos;
      const bool is_build = word.rfind("build/", 0) == 0;
      if (plain && !is_build && word.find('/') != std::string::npos) paths.insert(word);
      at = line.find('`', end + 1);
    }
  }
  return paths;
}

// The targets of [text](target) and ![text](target) that are not addresses.
std::set<std::string> links_of(const std::string& prose) {
  std::set<std::string> links;
  for (std::size_t at = prose.find("]("); at != std::string::npos; at = prose.find("](", at)) {
    at += 2;
    const std::string target = prose.substr(at, prose.find_first_of(")#\n", at) - at);
    if (!target.empty() && target.find("://") == std::string::npos) links.insert(target);
  }
  return links;
}

TEST(Pages, ReadmeExamplesAreTheCompiledFiles) {
  const auto blocks = blocks_of(read_file(root / "README.md"), "cpp");
  ASSERT_EQ(blocks.size(), 2u);
  const char* const files[] = {"examples/readme_example.cpp", "examples/readme_cache_example.cpp"};
  for (std::size_t i = 0; i < 2; ++i) {
    const std::string file = read_file(root / files[i]);
    const std::size_t first = file.find("#include");
    const std::size_t end = file.find("// End of the example of README.md.\n");
    ASSERT_NE(end, std::string::npos);
    EXPECT_EQ(blocks[i], file.substr(first, end - first));
  }
}

// Every row | method | bits | KL | output error | of the README whose method the demo has.
TEST(Pages, ReadmeNumbersAreWhatTheDemoMeasures) {
  const std::string page = read_file(root / "README.md");
  std::vector<kvarn_demo::head> heads;
  for (const auto& name : kvarn_demo::find_heads(KVARN_TEST_DATA_DIR))
    heads.push_back(kvarn_demo::load_head(KVARN_TEST_DATA_DIR, name));
  int rows = 0;
  for (const auto& method : kvarn_demo::all_methods()) {
    const std::string start = "\n| " + method.name + " | ";
    const std::size_t at = page.find(start);
    if (at == std::string::npos) continue;
    ++rows;
    double bits = 0;
    double kl = 0;
    double output = 0;
    char bar = 0;
    std::istringstream row(page.substr(at + start.size(), 80));
    ASSERT_TRUE(row >> bits >> bar >> kl >> bar >> output) << method.name;

    std::vector<kvarn_demo::evaluation> evaluations;
    for (const auto& head : heads) evaluations.push_back(kvarn_demo::evaluate(head, method));
    const auto mean = kvarn_demo::mean_over_heads(evaluations);
    EXPECT_NEAR(bits, mean.size().bits_per_element(), 0.01) << method.name;
    EXPECT_NEAR(kl / mean.attention_kl, 1, 0.005) << method.name;
    EXPECT_NEAR(output / mean.output_rel_sq_error, 1, 0.005) << method.name;
  }
  EXPECT_GE(rows, 7);
}

TEST(Pages, MethodTableIsRecipeOf) {
  const std::string page = read_file(root / "docs/method.md");
  const char* const scalings[] = {"rms", "rms_equalized", "dual_axis", "dual_axis_equivariant"};
  const auto yes_no = [](bool value) { return value ? "yes" : "no"; };
  for (const auto& [method, name] : kvarn::encoder_infos)
    for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value}) {
      const auto recipe = kvarn::recipe_of(method, kind, 2);
      std::ostringstream row;
      row << "| " << name << " | " << (kind == kvarn::tile_kind::key ? "key" : "value") << " | "
          << scalings[static_cast<int>(recipe.scaling)] << " | " << recipe.iterations << " | ";
      for (const int bits : kvarn::supported_bits) {
        auto other = kvarn::recipe_of(method, kind, bits);
        row << (bits == 2 ? "" : ", ") << other.range;
        other.range = recipe.range;
        EXPECT_EQ(other, recipe) << "only the range may depend on the bits, or the table must grow";
      }
      row << " | " << yes_no(recipe.cover) << " | " << recipe.refits << " | "
          << yes_no(recipe.unbiased) << " | ";
      if (recipe.choose_scales)
        row << recipe.along;
      else
        row << "no";
      row << " | " << yes_no(recipe.error_feedback) << " |\n";
      EXPECT_NE(page.find(row.str()), std::string::npos) << row.str();
    }
}

TEST(Pages, LinksAndPathsExist) {
  std::size_t links = 0;
  std::size_t paths = 0;
  std::vector<std::filesystem::path> pages{"README.md", "CONTRIBUTING.md"};
  for (const auto& entry : std::filesystem::directory_iterator(root / "docs"))
    if (entry.path().extension() == ".md") pages.push_back("docs" / entry.path().filename());
  ASSERT_GE(pages.size(), 5u);
  for (const auto& page : pages) {
    const std::string text = prose_of(read_file(root / page));
    for (const auto& link : links_of(text)) {
      ++links;
      EXPECT_TRUE(std::filesystem::exists(root / page.parent_path() / link))
          << page << " links to " << link;
    }
    for (const auto& path : paths_of(text)) {
      ++paths;
      EXPECT_TRUE(std::filesystem::exists(root / path)) << page << " names " << path;
    }
  }
  EXPECT_GE(links, 10u);
  EXPECT_GE(paths, 30u);
}

}  // namespace
