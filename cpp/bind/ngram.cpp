#include <array>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "core/ngram_model.h"
#include "core/ngram_prune.h"
#include "core/ngram_writer.h"
#include "core/trie.h"
#include "support/check.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace dart {
namespace {

template <typename T, size_t kAxes>
using NewArray = nb::ndarray<T, nb::numpy, nb::ndim<kAxes>, nb::c_contig>;

template <typename T, size_t kAxes>
NewArray<T, kAxes> new_array(const std::array<size_t, kAxes>& shape) {
  size_t size = 1;
  for (const size_t axis : shape) size *= axis;
  auto* data = new T[size]();
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return NewArray<T, kAxes>(data, kAxes, shape.data(), owner);
}

auto query(const NgramModel& model, const std::vector<int32_t>& context,
           const std::vector<int32_t>& candidates) {
  const size_t n = candidates.size();
  auto probability = new_array<float, 1>({n});
  auto matched_length = new_array<int32_t, 1>({n});
  model.probability(model.find(context), candidates, {probability.data(), n},
                    {matched_length.data(), n});
  return std::pair(std::move(probability), std::move(matched_length));
}

auto query_batch(const NgramModel& model, const Array<const int32_t, 2>& contexts,
                 const Array<const int32_t, 2>& candidates) {
  const size_t rows = contexts.shape(0);
  const size_t length = contexts.shape(1);
  const size_t width = candidates.shape(1);
  DART_CHECK(candidates.shape(0) == rows, "contexts have ", rows, " rows, candidates ",
             candidates.shape(0));
  auto probability = new_array<float, 2>({rows, width});
  auto matched_length = new_array<int32_t, 2>({rows, width});
  {
    const nb::gil_scoped_release release;
    for (size_t row = 0; row < rows; ++row) {
      const auto context = model.find({contexts.data() + row * length, length});
      model.probability(context, {candidates.data() + row * width, width},
                        {probability.data() + row * width, width},
                        {matched_length.data() + row * width, width});
    }
  }
  return std::pair(std::move(probability), std::move(matched_length));
}

uint64_t path_count(const NgramModel& model, const std::vector<int32_t>& path) {
  if (path.empty()) return model.header().total;
  DART_CHECK(path.size() <= static_cast<size_t>(model.order()), "a path of ", path.size(),
             " tokens exceeds the order ", model.order());
  uint32_t node = 0;
  int level = 0;
  for (const int32_t token : path) {
    node = model.child(level, node, token);
    if (node == NgramModel::kAbsent) return 0;
    ++level;
  }
  return model.count(level, node);
}

// The children of the longest suffix of `context` that has any.
auto continuations(const NgramModel& model, const std::vector<int32_t>& context) {
  const auto found = model.find(context);
  uint32_t begin = 0;
  uint32_t end = 0;
  int length = model.order() - 1;
  for (; length >= 1 && begin == end; --length) {
    const uint32_t node = found.node[length - 1];
    if (node != NgramModel::kAbsent) std::tie(begin, end) = model.children(length, node);
  }
  const int level = length + 2;
  auto token = new_array<int32_t, 1>({end - begin});
  auto count = new_array<uint32_t, 1>({end - begin});
  for (uint32_t child = begin; child < end; ++child) {
    token.data()[child - begin] = model.token(level, child);
    count.data()[child - begin] = model.count(level, child);
  }
  return std::tuple(std::move(token), std::move(count), begin == end ? 0 : length + 1);
}

void bind_model(nb::module_& m) {
  nb::class_<NgramModel>(m, "NgramModel",
                         "An n-gram model to look up. Calls from several threads are safe.")
      .def_static("open", &NgramModel::open, "path"_a, nb::call_guard<nb::gil_scoped_release>(),
                  "Map a compact file (constant time), or read a whole .trie into memory.\n\n"
                  "Raises ValueError, one line, if the file is not an n-gram file or damaged.")
      .def_prop_ro("order", &NgramModel::order)
      .def_prop_ro("node_count", &NgramModel::node_count, "Nodes, the root included.")
      .def_prop_ro("file_bytes", &NgramModel::bytes, "Size of the compact form.")
      .def_prop_ro(
          "total", [](const NgramModel& self) { return self.header().total; }, "Tokens counted.")
      .def_prop_ro(
          "vocab_size", [](const NgramModel& self) { return self.header().vocab_size; },
          "Tokens of the vocabulary it was built for, 0 if unknown.")
      .def_prop_ro(
          "highest_token",
          [](const NgramModel& self) {
            const uint32_t size = self.level_size(1);
            return size == 0 ? -1 : self.token(1, size - 1);
          },
          "Highest token id that begins an n-gram, -1 if there is none.")
      .def_prop_ro(
          "large_counts", [](const NgramModel& self) { return self.header().large_counts; },
          "Counts of the deepest level that stand beside their words.")
      .def_prop_ro(
          "tokenizer_sha256",
          [](const NgramModel& self) {
            const auto& hash = self.header().tokenizer_sha256;
            return nb::bytes(hash.data(), hash.size());
          },
          "Fingerprint of that vocabulary, 32 bytes, zeros if unknown.")
      .def_prop_ro(
          "metadata",
          [](const NgramModel& self) {
            const auto text = self.metadata();
            return nb::bytes(text.data(), text.size());
          },
          "JSON, UTF-8: where the model comes from.")
      .def_prop_ro(
          "level_sizes",
          [](const NgramModel& self) {
            const auto& sizes = self.header().level_size;
            return std::vector<uint32_t>(sizes.begin(), sizes.begin() + self.order());
          },
          "Distinct n-grams of 1 .. order tokens.")
      .def("query", &query, "context"_a, "candidates"_a,
           "Probability and matched suffix length of each candidate after `context`.")
      .def("query_batch", &query_batch, "contexts"_a.noconvert(), "candidates"_a.noconvert(),
           "contexts [P, C] int32, candidates [P, K] int32 -> (probability [P, K] float32,\n"
           "matched_length [P, K] int32), row by row as query(). A negative id is never seen.")
      .def("continuations", &continuations, "context"_a,
           "(token [n] int32, count [n] uint32, matched length): all that followed the longest\n"
           "seen suffix of `context`, ascending by token; empty and 0 if it has none.")
      .def("count", &path_count, "path"_a,
           "How often the n-gram `path` was counted, 0 if never; of the empty path: all tokens.")
      .def("verify", &NgramModel::verify, nb::call_guard<nb::gil_scoped_release>(),
           "Read and check the whole file. Raises RuntimeError with the first fault.");
}

Vocabulary vocabulary_of(uint32_t size, const nb::bytes& sha256) {
  Vocabulary vocabulary;
  vocabulary.size = size;
  DART_CHECK(sha256.size() == 0 || sha256.size() == vocabulary.sha256.size(),
             "a SHA-256 has 32 bytes, got ", sha256.size());
  std::memcpy(vocabulary.sha256.data(), sha256.data(), sha256.size());
  return vocabulary;
}

// Work runs without the GIL; its progress calls take it, and let Ctrl-C through.
Progress progress_of(const nb::object& callback) {
  return [callback = callback.ptr()](uint64_t done, uint64_t whole) {
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    const nb::handle call(callback);
    if (!call.is_none()) call(done, whole);
  };
}

void bind_builder(nb::module_& m) {
  nb::class_<NgramBuilder>(m, "NgramBuilder", "Turns n-grams in ascending order into a model.")
      .def(
          "__init__",
          [](NgramBuilder* self, int order, uint32_t vocab_size, const nb::bytes& sha256,
             const std::string& folder) {
            new (self) NgramBuilder(order, vocabulary_of(vocab_size, sha256), folder);
          },
          "order"_a, "vocab_size"_a, "sha256"_a = nb::bytes("", 0), "folder"_a = "",
          "sha256: fingerprint of the vocabulary, empty if unknown.\n"
          "folder: for scratch files that the system may page out; empty: memory alone.")
      .def(
          "append",
          [](NgramBuilder& self, const Array<const int32_t, 2>& gram,
             const Array<const int64_t, 1>& count) {
            const auto grams = span_of(gram);
            const auto counts = span_of(count);
            const nb::gil_scoped_release release;
            self.append(grams, counts);
          },
          "gram"_a.noconvert(), "count"_a.noconvert(),
          "gram [rows, order] int32, -1 after the end of a short n-gram; count [rows] int64.\n"
          "Rows ascend strictly, over all calls. Raises ValueError if not.")
      .def(
          "write",
          [](NgramBuilder& self, const std::string& path, const std::string& metadata) {
            const nb::gil_scoped_release release;
            NgramLevels& levels = self.finish();
            levels.metadata = metadata;
            return levels.write(path);
          },
          "path"_a, "metadata"_a = "{}", "Write the compact file; return its size in bytes.");
}

void bind_tools(nb::module_& m) {
  m.def(
      "convert_trie",
      [](const std::string& from, const std::string& to, uint32_t vocab_size,
         const nb::bytes& sha256, bool repair_counts, const std::string& folder,
         const std::string& metadata, const nb::object& progress) {
        const TrieOptions options{vocabulary_of(vocab_size, sha256), repair_counts, folder,
                                  metadata, progress_of(progress)};
        const nb::gil_scoped_release release;
        return convert_trie(from, to, options);
      },
      "source"_a, "target"_a, "vocab_size"_a = 0, "sha256"_a = nb::bytes("", 0),
      "repair_counts"_a = false, "folder"_a = "", "metadata"_a = "{}", "progress"_a = nb::none(),
      "Check a .trie and write its compact form; return the size in bytes.\n\n"
      "progress(done, whole) is called now and then. Raises ValueError, one line.");
  m.def(
      "write_trie",
      [](const NgramModel& model, const std::string& target, const nb::object& progress) {
        const Progress report = progress_of(progress);
        const nb::gil_scoped_release release;
        write_trie(model, target, report);
      },
      "model"_a, "target"_a, "progress"_a = nb::none(), "Write a model as a .trie.");
  m.def(
      "prune_ngram",
      [](const NgramModel& model, const std::string& target, uint32_t min_count, uint64_t max_nodes,
         uint64_t max_bytes, const std::string& folder, const std::string& metadata,
         const nb::object& progress) {
        const PruneOptions options{min_count, max_nodes, max_bytes,
                                   folder,    metadata,  progress_of(progress)};
        const nb::gil_scoped_release release;
        return prune(model, options).write(target);
      },
      "model"_a, "target"_a, "min_count"_a = 1, "max_nodes"_a = 0, "max_bytes"_a = 0,
      "folder"_a = "", "metadata"_a = "{}", "progress"_a = nb::none(),
      "Write the model's most useful part that keeps the limits (0: none); return its bytes.");
}

}  // namespace

void bind_ngram(nb::module_& m) {
  m.attr("NGRAM_MAGIC") = nb::bytes(kNgramMagic.data(), kNgramMagic.size());
  m.attr("NGRAM_VERSION") = kNgramVersion;
  bind_model(m);
  bind_builder(m);
  bind_tools(m);
}

}  // namespace dart
