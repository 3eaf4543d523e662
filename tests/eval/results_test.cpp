// Results come back from files as they went in, only for the same settings, and to one at a time.
#include "../../tools/eval/results.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../tools/eval/hash.hpp"

namespace {

using namespace kvarn_eval;

class Results : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(folder); }
  void TearDown() override { std::filesystem::remove_all(folder); }

  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() /
      ("kvarn_results_" +
       std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
  const window_key window{"c0", {{"window", 8}, {"tokens", "abc"}}, 3, 1};
  const method_result result{.bits = 2.25,
                             .seconds = 3,
                             .pseudo_decode = {{0.1f, 0.2f, 0.3f}, {1, 2, 3}, {1, 0, 1}},
                             .static_kl = {0.05f, 0.1f, 0.2f},
                             .heads = {{.layer = 1, .head = 2, .key = 0.5, .output = 0.25}}};
};

TEST_F(Results, ComeBack) {
  const result_folder files(folder);
  EXPECT_FALSE(files.load(window, "kivi"));
  files.save(window, "kivi", result);
  files.save_exact(window, {{1, 2, 2.5f}, {7}});
  const auto back = files.load(window, "kivi");
  ASSERT_TRUE(back);
  EXPECT_EQ(back->bits, result.bits);
  EXPECT_EQ(back->pseudo_decode.kl, result.pseudo_decode.kl);
  EXPECT_EQ(back->pseudo_decode.nll, result.pseudo_decode.nll);
  EXPECT_EQ(back->pseudo_decode.agrees, result.pseudo_decode.agrees);
  EXPECT_EQ(back->static_kl, result.static_kl);
  ASSERT_EQ(back->heads.size(), 1u);
  EXPECT_EQ(back->heads[0].layer, 1);
  EXPECT_EQ(back->heads[0].key, 0.5);
  EXPECT_EQ(back->heads[0].output, 0.25);
  EXPECT_EQ(files.load_exact(window)->skipped_nll, std::vector<float>{7});
}

// What f throws.
template <class F>
std::string refusal(const F& f) {
  try {
    f();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST_F(Results, OfOtherSettingsAreRefused) {
  const result_folder files(folder);
  files.save(window, "kivi", result);
  files.save_exact(window, {{1, 2, 2.5f}, {7}});
  window_key other = window;
  other.settings["window"] = 9;
  EXPECT_EQ(refusal([&] { files.load(other, "kivi"); })
                .find((folder / "windows" / "c0.kivi.json").string() +
                      ": was made with other settings: window is 8 there, 9 here."),
            0u);
  // A file of an older version, and one of a newer.
  other = window;
  other.settings["model_hash"] = "00ff";
  EXPECT_NE(
      refusal([&] { files.load_exact(other); }).find("model_hash is missing there, \"00ff\" here"),
      std::string::npos);
  other.settings = {{"window", 8}};
  EXPECT_NE(
      refusal([&] { files.load(other, "kivi"); }).find("tokens is \"abc\" there, missing here"),
      std::string::npos);
  // Nothing is lost by that, and another order is no other setting.
  other.settings = {{"tokens", "abc"}, {"window", 8}};
  EXPECT_TRUE(files.load(other, "kivi"));
}

TEST_F(Results, AreForgotten) {
  const result_folder files(folder);
  files.save(window, "kivi", result);
  files.save(window, "tuned_k2v2", result);
  files.save_retrieval("lines20.kivi", {{"sink", 128}}, {20, 300, 20, 17, 0.5});
  files.forget("c0", "kivi");
  files.forget("c0", "kitty");  // not there
  files.forget_retrieval("lines20.kivi");
  EXPECT_FALSE(files.load(window, "kivi"));
  EXPECT_TRUE(files.load(window, "tuned_k2v2"));
  EXPECT_FALSE(files.load_retrieval("lines20.kivi", {{"sink", 128}}));
}

TEST_F(Results, BelongToOneAtATime) {
  {
    const result_folder files(folder);
    const std::string message = refusal([&] { result_folder{folder}; });
    EXPECT_EQ(message.find(folder.string() + ": another kvarn-eval is writing its results there"),
              0u)
        << message;
    EXPECT_NO_THROW(result_folder{folder / "another"});
    files.save(window, "kivi", result);
  }
  EXPECT_TRUE(result_folder(folder).load(window, "kivi"));
  // A folder that cannot be, and one that gives no lock.
  std::ofstream(folder / "file") << "text";
  EXPECT_NE(refusal([&] { result_folder{folder / "file"}; }).find("cannot be created"),
            std::string::npos);
  std::filesystem::remove(folder / "lock");
  std::filesystem::create_directory(folder / "lock");
  EXPECT_EQ(refusal([&] { result_folder{folder}; }).find(folder.string() + ": cannot be locked: "),
            0u);
}

// The published values of FNV-1a.
TEST(Hash, IsFnv1a) {
  const auto of = [](const std::string& text) {
    return hash_of(std::as_bytes(std::span(text.data(), text.size())));
  };
  EXPECT_EQ(of(""), "cbf29ce484222325");
  EXPECT_EQ(of("a"), "af63dc4c8601ec8c");
  EXPECT_EQ(of("foobar"), "85944171f73967e8");
  const std::vector<int> tokens{97, 70000}, others{70000, 97};
  EXPECT_NE(hash_of(std::span(tokens)), hash_of(std::span(others)));
}

// A method that breaks down has a result too, which is not computed again and again.
TEST_F(Results, ThatAreNotFiniteComeBackAsNaN) {
  const result_folder files(folder);
  const float nan = std::nanf("");
  method_result broken = result;
  broken.pseudo_decode = {{nan, 0.2f, INFINITY}, {1, nan, -INFINITY}, {0, 1, 0}};
  broken.static_kl = {nan, nan, 3};
  broken.heads[0].key = std::nan("");
  files.save(window, "kivi", broken);
  files.save_exact(window, {{nan, 2, 2.5f}, {INFINITY}});
  files.save_retrieval("lines20.kivi", {{"sink", 128}}, {20, 300, 20, 0, std::nan("")});
  const auto back = files.load(window, "kivi");
  const auto exact = files.load_exact(window);
  const auto retrieval = files.load_retrieval("lines20.kivi", {{"sink", 128}});
  ASSERT_TRUE(back && exact && retrieval);
  const auto expect = [](const std::vector<float>& numbers, const std::vector<float>& saved) {
    ASSERT_EQ(numbers.size(), saved.size());
    for (std::size_t i = 0; i < saved.size(); ++i)
      EXPECT_TRUE(numbers[i] == saved[i] || (!std::isfinite(saved[i]) && std::isnan(numbers[i])));
  };
  expect(back->pseudo_decode.kl, broken.pseudo_decode.kl);
  expect(back->pseudo_decode.nll, broken.pseudo_decode.nll);
  expect(back->static_kl, broken.static_kl);
  expect(exact->nll, {nan, 2, 2.5f});
  expect(exact->skipped_nll, {nan});
  EXPECT_EQ(back->pseudo_decode.agrees, broken.pseudo_decode.agrees);
  EXPECT_TRUE(std::isnan(back->heads[0].key));
  EXPECT_EQ(back->heads[0].output, 0.25);
  EXPECT_TRUE(std::isnan(retrieval->nll));
}

TEST_F(Results, DamagedCountAsNone) {
  const result_folder files(folder);
  files.save(window, "kivi", result);
  const auto path = folder / "windows" / "c0.kivi.json";
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  EXPECT_FALSE(files.load(window, "kivi"));
  std::ofstream(path) << "{\"settings\":{\"window\":8,\"tokens\":\"abc\"},\"bits\":2}";
  EXPECT_FALSE(files.load(window, "kivi"));
}

// Scores that are fewer than the positions would be read beyond their end.
TEST_F(Results, OfAnotherNumberOfPositionsCountAsNone) {
  const result_folder files(folder);
  const auto comes_back = [&](const auto& change) {
    method_result changed = result;
    change(changed);
    files.save(window, "kivi", changed);
    return files.load(window, "kivi").has_value();
  };
  EXPECT_TRUE(comes_back([](method_result&) {}));
  EXPECT_TRUE(comes_back([](method_result& r) { r.static_kl.clear(); }));
  EXPECT_FALSE(comes_back([](method_result& r) { r.static_kl.pop_back(); }));
  EXPECT_FALSE(comes_back([](method_result& r) { r.pseudo_decode.kl.pop_back(); }));
  EXPECT_FALSE(comes_back([](method_result& r) { r.pseudo_decode.nll.push_back(1); }));
  EXPECT_FALSE(comes_back([](method_result& r) { r.pseudo_decode.agrees.clear(); }));
  files.save_exact(window, {{1, 2, 2.5f}, {7}});
  EXPECT_TRUE(files.load_exact(window));
  files.save_exact(window, {{1, 2}, {7}});
  EXPECT_FALSE(files.load_exact(window));
  files.save_exact(window, {{1, 2, 2.5f}, {}});
  EXPECT_FALSE(files.load_exact(window));
}

TEST_F(Results, OfRetrievalComeBackUnlessDamaged) {
  const result_folder files(folder);
  const nlohmann::ordered_json settings{{"sink", 128}};
  EXPECT_FALSE(files.load_retrieval("lines20.kivi", settings));
  files.save_retrieval("lines20.kivi", settings, {20, 300, 20, 17, 0.5});
  const auto back = files.load_retrieval("lines20.kivi", settings);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->lines, 20);
  EXPECT_EQ(back->tokens, 300);
  EXPECT_EQ(back->questions, 20);
  EXPECT_EQ(back->right, 17);
  EXPECT_EQ(back->nll, 0.5);
  EXPECT_THROW(files.load_retrieval("lines20.kivi", {{"sink", 64}}), std::runtime_error);
  std::ofstream(folder / "windows" / "lines20.kivi.result.json")
      << R"({"settings": {"sink": 128}, "result": {"lines": 20}})";
  EXPECT_FALSE(files.load_retrieval("lines20.kivi", settings));
}

TEST_F(Results, ReportOfOnePositionHasNoThirds) {
  evaluation all;
  all.windows = {window};
  all.exact = {{{1}, {7}}};
  all.methods = {"kivi"};
  method_result result;
  result.bits = 2.25;
  result.pseudo_decode = {{0.5f}, {1}, {1}};
  all.results = {{result}};
  const auto report = to_json(all);
  EXPECT_EQ(report.at("methods").at(0).at("all").at("kl_mean"), 0.5);
  EXPECT_TRUE(report.at("methods").at(0).at("thirds").empty());
}

TEST_F(Results, ReportSumsUp) {
  evaluation all;
  all.first_scored = 1;
  all.group = 2;
  all.windows = {window, {"c9", {}, 3, 1}};
  all.exact = {{{1, 2, 2.5f}, {7}}, {{2, 2, 2}, {1}}};
  all.methods = {"kivi"};
  all.results = {{result, result}};
  const auto report = to_json(all);
  const auto& method = report.at("methods").at(0);
  EXPECT_NEAR(method.at("all").at("kl_mean").get<double>(), 0.2, 1e-7);
  EXPECT_EQ(method.at("all").at("positions"), 6);
  EXPECT_EQ(method.at("windows").size(), 2u);
  ASSERT_EQ(method.at("thirds").size(), 3u);
  EXPECT_NEAR(method.at("thirds").at(2).at("kl_mean").get<double>(), 0.3, 1e-7);
  ASSERT_EQ(method.at("by_position").size(), 2u);
  EXPECT_EQ(method.at("by_position").at(1).at("position"), 3);
  EXPECT_NEAR(method.at("by_position").at(0).at("static_kl").get<double>(), 0.075, 1e-7);
  EXPECT_EQ(method.at("heads").at(0).at("k_rel_sq_error"), 0.5);
  EXPECT_EQ(report.at("windows").at(0).at("tokens"), 5);

  const std::string csv = to_csv(all);
  EXPECT_NE(csv.find("kivi,2.25,c0,3,0.2,0.2,"), std::string::npos) << csv;
  EXPECT_NE(csv.find("kivi,2.25,all,6,0.2,"), std::string::npos) << csv;
  std::ostringstream table;
  print_table(table, all);
  EXPECT_NE(table.str().find("kivi"), std::string::npos);
}

}  // namespace
