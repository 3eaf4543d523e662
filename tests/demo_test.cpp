// The demo on made-up heads: what it quantises, what it writes, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../examples/demo/cli.hpp"
#include "support/npy_files.hpp"
#include "support/profiles.hpp"

namespace {

using kvarn_test::write_npy;

namespace fs = std::filesystem;

// A folder for input files and reports that is gone after the test.
class temporary_folder {
 public:
  temporary_folder()
      : path_(fs::path(testing::TempDir()) /
              (std::string("kvarn_demo_") +
               testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~temporary_folder() { fs::remove_all(path_); }
  temporary_folder(const temporary_folder&) = delete;
  temporary_folder& operator=(const temporary_folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::vector<float> normal_values(std::size_t count, std::uint64_t seed) {
  kvarn_test::gaussian_source random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(random.normal());
  return values;
}

kvarn_demo::head make_head(std::size_t tokens, std::size_t value_dim, std::size_t query_heads) {
  const auto& profile = kvarn_test::kv_profiles[3];
  const auto key_dim = static_cast<std::size_t>(profile.head_dim);
  return {.name = "made.up",
          .tokens = tokens,
          .query_heads = query_heads,
          .key_dim = key_dim,
          .value_dim = value_dim,
          .keys = kvarn_test::make_kv_sample(profile, static_cast<int>(tokens), 1).keys,
          .values = normal_values(tokens * value_dim, 2),
          .queries = normal_values(tokens * query_heads * key_dim, 3)};
}

void write_head(const fs::path& folder, const kvarn_demo::head& h) {
  write_npy(folder / (h.name + ".k.npy"), {h.tokens, h.key_dim}, h.keys);
  write_npy(folder / (h.name + ".v.npy"), {h.tokens, h.value_dim}, h.values);
  write_npy(folder / (h.name + ".q.npy"), {h.tokens, h.query_heads, h.key_dim}, h.queries);
}

struct outcome {
  int status;
  std::string out;
  std::string err;
};

outcome run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "kvarn-demo");
  std::vector<const char*> argv;
  for (const auto& argument : arguments) argv.push_back(argument.c_str());
  std::ostringstream out, err;
  const int status = kvarn_demo::run_cli(static_cast<int>(argv.size()), argv.data(),
                                         KVARN_TEST_DATA_DIR, out, err);
  return {status, out.str(), err.str()};
}

const kvarn_demo::method& method_named(std::string_view name) {
  static const auto methods = kvarn_demo::all_methods();
  const auto found =
      std::find_if(methods.begin(), methods.end(), [&](const auto& m) { return m.name == name; });
  if (found == methods.end()) throw std::out_of_range("no method " + std::string(name));
  return *found;
}

// ---- What is quantised ----

TEST(Demo, SinkAndTailStayExact) {
  for (const std::size_t tokens : {384u, 500u, 511u, 512u}) {
    const auto head = make_head(tokens, 80, 1);
    const std::size_t groups = tokens == 512 ? 2 : 1;
    ASSERT_EQ(head.groups(), groups);
    for (const auto& method : kvarn_demo::all_methods()) {
      if (!kvarn_demo::check(head, method).ok()) continue;
      const auto quantised = kvarn_demo::quantise(head, method, 1);
      const auto expect_body_only = [&](const std::vector<float>& exact,
                                        const std::vector<float>& approximate, std::size_t dim) {
        ASSERT_EQ(approximate.size(), exact.size());
        for (std::size_t t = 0; t < tokens; ++t) {
          const auto first = static_cast<std::ptrdiff_t>(t * dim);
          const bool equal =
              std::equal(exact.begin() + first, exact.begin() + first + static_cast<int>(dim),
                         approximate.begin() + first);
          ASSERT_EQ(equal, t < 128 || t >= 128 + 128 * groups) << method.name << ", token " << t;
        }
      };
      expect_body_only(head.keys, quantised.keys, head.key_dim);
      expect_body_only(head.values, quantised.values, head.value_dim);
    }
  }
}

TEST(Demo, QueryAwareKnowsTheQueriesUpToItsGroupOnly) {
  const auto head = make_head(640, 64, 2);  // three groups
  const auto& method = method_named("query_aware_k2v2");
  const auto original = kvarn_demo::quantise(head, method, 1);
  // The groups of keys that change when the queries of one token do.
  const auto changed_groups = [&](std::size_t token) {
    auto other = head;
    const std::size_t token_size = head.query_heads * head.key_dim;
    for (std::size_t i = 0; i < token_size; ++i) other.queries[token * token_size + i] *= 100;
    const auto quantised = kvarn_demo::quantise(other, method, 1);
    EXPECT_EQ(quantised.values, original.values);
    std::string changed;
    for (std::size_t g = 0; g < head.groups(); ++g) {
      const auto first = static_cast<std::ptrdiff_t>((128 + 128 * g) * head.key_dim);
      const auto end = first + static_cast<std::ptrdiff_t>(128 * head.key_dim);
      changed += std::equal(original.keys.begin() + first, original.keys.begin() + end,
                            quantised.keys.begin() + first)
                     ? '-'
                     : 'x';
    }
    return changed;
  };
  EXPECT_EQ(changed_groups(0), "xxx");
  EXPECT_EQ(changed_groups(255), "xxx");
  EXPECT_EQ(changed_groups(256), "-xx");
  EXPECT_EQ(changed_groups(511), "--x");
  EXPECT_EQ(changed_groups(512), "---");
}

TEST(Demo, SizesAreThoseOfTheRecords) {
  const auto bits = [](const std::string& method, std::size_t dim) {
    kvarn_demo::head head = make_head(384, dim, 1);
    head.key_dim = dim;
    head.keys = normal_values(head.tokens * dim, 4);
    head.queries = normal_values(head.tokens * dim, 5);
    const auto quantised = kvarn_demo::quantise(head, method_named(method), 1);
    return std::vector<double>{quantised.key_size.bits_per_element(),
                               quantised.value_size.bits_per_element(),
                               (quantised.key_size + quantised.value_size).bits_per_element()};
  };
  using sizes = std::vector<double>;
  EXPECT_EQ(bits("query_aware_k2v2", 128), (sizes{2.25, 2.25, 2.25}));
  EXPECT_EQ(bits("tuned_k2v2", 64), (sizes{2.3125, 2.4375, 2.375}));
  EXPECT_EQ(bits("paper_k4v2", 128), (sizes{4.25, 2.25, 3.25}));
  EXPECT_EQ(bits("tuned_k3v3", 128), (sizes{3.25, 3.25, 3.25}));
  EXPECT_EQ(bits("kivi", 64), (sizes{2.25, 2.5, 2.375}));
}

TEST(Demo, MeanOverHeads) {
  kvarn_demo::evaluation a, b;
  a.key_size = {10, 100};
  b.key_size = {30, 60};
  a.value_size = {20, 40};
  b.value_size = {40, 40};
  a.attention_kl = 0.02;
  b.attention_kl = 0.5;
  a.encode_us_per_tile = 3;
  b.encode_us_per_tile = 5;
  const std::vector both{a, b};
  const auto mean = kvarn_demo::mean_over_heads(both);
  EXPECT_DOUBLE_EQ(mean.attention_kl, 0.1);
  EXPECT_DOUBLE_EQ(*mean.encode_us_per_tile, 4);
  EXPECT_DOUBLE_EQ(mean.size().bits_per_element(), 8 * 100.0 / 240);
  EXPECT_EQ(mean.v_rel_sq_error, 0);  // of zeros
}

// ---- The report ----

TEST(Demo, WritesTableAndReport) {
  const temporary_folder folder;
  auto head = make_head(400, 80, 2);
  write_head(folder.path(), head);
  head.name = "second";
  write_head(folder.path(), head);
  std::ofstream(folder.path() / "reference.json") << "not a head";
  const fs::path path = folder.path() / "new" / "folder" / "report.json";
  const auto result =
      run({"--data", folder.path().string(), "--report", path.string(), "--repeats", "1"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.err, "");

  const auto report = nlohmann::json::parse(std::ifstream(path));
  ASSERT_EQ(report.at("heads").size(), 2u);
  for (const char* method : {"kivi", "rotation_kivi", "rtn_token", "rtn_channel", "paper_k2v2",
                             "paper_k4v2", "paper_k4v4", "paper_k3v3", "refit_k2v2", "tuned_k2v2",
                             "tuned_k4v2", "tuned_k4v4", "tuned_k3v3", "query_aware_k2v2",
                             "query_aware_k4v2", "query_aware_k4v4", "query_aware_k3v3"}) {
    const auto& values = report.at("heads").at("made.up").at(method);
    for (const char* field :
         {"bits_per_element", "k_bits_per_element", "v_bits_per_element", "bytes", "fp16_bytes",
          "k_rel_sq_error", "v_rel_sq_error", "e_m_share", "attention_kl", "output_rel_sq_error",
          "output_rel_sq_error_v_only"})
      EXPECT_GT(values.at(field).get<double>(), 0) << method << " " << field;
    EXPECT_EQ(values.at("fp16_bytes"), 2 * 128 * (64 + 80)) << method;
    const bool packed = report.at("methods").at(method).at("packed").get<bool>();
    EXPECT_EQ(values.at("encode_us_per_tile").is_number(), packed) << method;
    EXPECT_EQ(packed, kvarn::find_baseline(method) == nullptr) << method;
  }
  // Equal heads: their mean is either of them.
  EXPECT_NEAR(report.at("mean").at("tuned_k2v2").at("attention_kl").get<double>(),
              report.at("heads").at("second").at("tuned_k2v2").at("attention_kl").get<double>(),
              1e-12);

  std::istringstream lines(result.out);
  bool has_sentence = false;
  int marked = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("report: ", 0) != 0) {
      EXPECT_LE(line.size(), 100u) << line;
    }
    has_sentence |= line.rfind("See ", 0) == 0;
    marked += line.rfind("  * tuned_", 0) == 0 || line.rfind("  * query_aware_", 0) == 0;
  }
  EXPECT_TRUE(has_sentence);
  EXPECT_EQ(marked, 3 * 8);  // two heads and their mean, two encoders, four pairs of widths
}

TEST(Demo, EqualInputGivesEqualReports) {
  const auto head = make_head(384, 64, 1);
  const std::vector methods{method_named("query_aware_k2v2"), method_named("paper_k3v3")};
  const auto errors = [&] {
    const std::vector results{kvarn_demo::evaluate_all(head, methods)};
    auto json = kvarn_demo::to_json(results, methods).at("heads");
    for (auto& [name, values] : json.at(head.name).items()) values.erase("encode_us_per_tile");
    return json;
  };
  EXPECT_EQ(errors(), errors());
}

TEST(Demo, HeadsWithoutErrorHaveNoRatios) {
  auto head = make_head(384, 64, 1);
  std::ranges::fill(head.keys, 0.0f);
  std::ranges::fill(head.values, 0.0f);
  head.name = "not UTF-8: \xff";
  const std::vector methods{method_named("query_aware_k2v2"), method_named("paper_k2v2"),
                            method_named("paper_k3v3")};
  const std::vector results{kvarn_demo::evaluate_all(head, methods)};
  for (const auto& e : results[0].evaluations) EXPECT_EQ(e.attention_kl, 0);
  std::ostringstream out;
  kvarn_demo::print_head(out, results[0], methods);
  kvarn_demo::print_summary(out, results, methods);
  EXPECT_NE(out.str().find("paper_k2v2"), std::string::npos);
  EXPECT_EQ(out.str().find("nan"), std::string::npos) << out.str();
  EXPECT_EQ(out.str().find("See "), std::string::npos) << out.str();

  const temporary_folder folder;
  const auto path = folder.path() / "report.json";
  kvarn_demo::write_json(path, kvarn_demo::to_json(results, methods));
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(path)).at("heads").size(), 1u);
}

// ---- What is refused ----

struct refusal {
  const char* name;
  std::function<void(const fs::path&, kvarn_demo::head)> break_folder;
  std::vector<std::string> message;  // parts that it must have
};

void PrintTo(const refusal& r, std::ostream* out) { *out << r.name; }

class DemoRefuses : public testing::TestWithParam<refusal> {};

TEST_P(DemoRefuses, WithAMessageThatNamesFileAndValue) {
  const temporary_folder folder;
  const fs::path data = folder.path() / "data";
  const fs::path report = folder.path() / "report.json";
  fs::create_directories(data);
  GetParam().break_folder(data, make_head(384, 64, 2));
  const auto result = run({"--data", data.string(), "--report", report.string()});
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_FALSE(fs::exists(report));
  for (const auto& part : GetParam().message)
    EXPECT_NE(result.err.find(part), std::string::npos) << "'" << part << "' in " << result.err;
}

std::vector<refusal> refusals() {
  using kvarn_demo::head;
  return {
      {"NoFolder",
       [](const fs::path& data, const head&) { fs::remove(data); },
       {"data: there is no such folder"}},
      {"AFile",
       [](const fs::path& data, const head&) {
         fs::remove(data);
         std::ofstream(data) << "text";
       },
       {"data: is not a folder"}},
      {"EmptyFolder", [](const fs::path&, const head&) {}, {"data: no head here"}},
      {"MissingFile",
       [](const fs::path& data, const head& h) {
         write_head(data, h);
         fs::remove(data / "made.up.v.npy");
       },
       {"made.up.v.npy: is missing"}},
      {"NotNpy",
       [](const fs::path& data, const head& h) {
         write_head(data, h);
         std::ofstream(data / "made.up.k.npy") << "0.5 0.25 0.125";
       },
       {"made.up.k.npy: does not start with the npy signature"}},
      {"ThreeDimensionsOfKeys",
       [](const fs::path& data, const head& h) {
         write_head(data, h);
         write_npy(data / "made.up.k.npy", {h.tokens, 1, h.key_dim}, h.keys);
       },
       {"made.up.k.npy: shape is [384, 1, 64]"}},
      {"FewerValues",
       [](const fs::path& data, head h) {
         write_head(data, h);
         h.values.resize(383 * h.value_dim);
         write_npy(data / "made.up.v.npy", {383, h.value_dim}, h.values);
       },
       {"made.up.v.npy: 383 tokens", "made.up.k.npy has 384"}},
      {"QueriesOfAnotherHeadDim",
       [](const fs::path& data, const head& h) {
         write_head(data, h);
         write_npy(data / "made.up.q.npy", {h.tokens, 1, 2 * h.key_dim}, h.queries);
       },
       {"made.up.q.npy: shape is [384, 1, 128]", "[384, query heads, 64]"}},
      {"MoreQueries",
       [](const fs::path& data, const head& h) {
         write_head(data, h);
         write_npy(data / "made.up.q.npy", {2 * h.tokens, 1, h.key_dim}, h.queries);
       },
       {"made.up.q.npy: shape is [768, 1, 64]", "[384, query heads, 64]"}},
      {"HeadDimOfKeys",
       [](const fs::path& data, head h) {
         h.key_dim = 32;
         h.keys.resize(h.tokens * h.key_dim);
         h.queries.resize(h.tokens * h.query_heads * h.key_dim);
         write_head(data, h);
       },
       {"made.up.k.npy: head_dim is 32; allowed are 64 80"}},
      {"HeadDimOfValues",
       [](const fs::path& data, head h) {
         h.value_dim = 48;
         h.values.resize(h.tokens * h.value_dim);
         write_head(data, h);
       },
       {"made.up.v.npy: head_dim is 48; allowed are 64 80"}},
      {"TooFewTokens",
       [](const fs::path& data, const head&) { write_head(data, make_head(383, 64, 1)); },
       {"made.up.k.npy: 383 tokens; at least 384"}},
      {"NotANumber",
       [](const fs::path& data, head h) {
         h.queries[77] = std::numeric_limits<float>::quiet_NaN();
         write_head(data, h);
       },
       {"made.up.q.npy: number 77 is", "nan"}},
      {"Infinity",
       [](const fs::path& data, head h) {
         h.values[5] = std::numeric_limits<float>::infinity();
         write_head(data, h);
       },
       {"made.up.v.npy: number 5 is inf"}},
  };
}

INSTANTIATE_TEST_SUITE_P(Input, DemoRefuses, testing::ValuesIn(refusals()),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(Demo, RefusesAReportThatCannotBeWritten) {
  const temporary_folder folder;
  std::ofstream(folder.path() / "file") << "text";
  for (const fs::path& path : {folder.path() / "file" / "report.json", folder.path()}) {
    try {
      kvarn_demo::write_json(path, {});
      FAIL() << path << " was written";
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find(folder.path().string()), std::string::npos);
    }
  }
}

TEST(Demo, CommandLine) {
  const auto help = run({"--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_NE(help.out.find("--report"), std::string::npos);
  for (const std::vector<std::string>& bad :
       {std::vector<std::string>{"--date", "x"}, {"--data"}, {"--repeats", "0"}, {"file"}}) {
    const auto result = run(bad);
    EXPECT_EQ(result.status, 1) << bad.front();
    EXPECT_NE(result.err, "") << bad.front();
  }
}

}  // namespace
