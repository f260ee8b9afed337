// core/tree.h, prune.h and pack.h: the arrays of a batch of trees, and the steps that fill them.
#include "bind/tree.h"

#include "bind/bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dart {

TreeArrays::TreeArrays(Array<int64_t, 2> token, Array<int32_t, 2> parent, Array<int32_t, 2> depth,
                       Array<float, 2> score, std::optional<Array<int64_t, 2>> position,
                       std::optional<Array<int64_t, 2>> first_child,
                       std::optional<Array<int64_t, 2>> next_sibling,
                       std::optional<Array<bool, 3>> mask,
                       std::optional<Array<uint64_t, 3>> mask_bits)
    : token_(std::move(token)),
      parent_(std::move(parent)),
      depth_(std::move(depth)),
      score_(std::move(score)),
      position_(std::move(position)),
      first_child_(std::move(first_child)),
      next_sibling_(std::move(next_sibling)),
      mask_(std::move(mask)),
      mask_bits_(std::move(mask_bits)) {
  const int64_t requests = this->requests(), width = this->width();
  DART_CHECK(width >= 1 && width <= kMaxWidth, "trees have a width of ", width,
             ", expected 1 (the root alone) to ", kMaxWidth);
  check_shape(parent_, "parent", {requests, width});
  check_shape(depth_, "depth", {requests, width});
  check_shape(score_, "score", {requests, width});
  check_shape(position_, "position", {requests, width});
  check_shape(first_child_, "first_child", {requests, width});
  check_shape(next_sibling_, "next_sibling", {requests, width});
  check_shape(mask_, "mask", {requests, width, width});
  check_shape(mask_bits_, "mask_bits", {requests, width, mask_words(static_cast<int>(width))});
  DART_CHECK(first_child_.has_value() == next_sibling_.has_value(),
             "first_child and next_sibling are written together: give both or neither");
}

TreeBatch TreeArrays::batch(const std::optional<Lengths>& length) const {
  check_shape(length, "length", {requests()});
  DART_CHECK(length.has_value() || !position_.has_value(),
             "positions need the committed length of each request");
  TreeBatch trees;
  trees.width = static_cast<int>(width());
  trees.token = span_of(token_);
  trees.parent = span_of(parent_);
  trees.depth = span_of(depth_);
  trees.score = span_of(score_);
  trees.length = span_of(length);
  trees.position = span_of(position_);
  trees.first_child = span_of(first_child_);
  trees.next_sibling = span_of(next_sibling_);
  const std::span<bool> mask = span_of(mask_);
  trees.mask = {reinterpret_cast<uint8_t*>(mask.data()), mask.size()};
  trees.mask_bits = span_of(mask_bits_);
  return trees;
}

namespace {

void prune_arrays(ThreadPool& pool, const Array<const int64_t, 2>& token,
                  const Array<const int32_t, 2>& parent, const Array<const int32_t, 2>& depth,
                  const Array<const float, 2>& score, float depth_bonus, const TreeArrays& trees) {
  const int64_t requests = trees.requests(), size = static_cast<int64_t>(token.shape(1));
  DART_CHECK(size >= 1, "a ledger holds at least the root, got none");
  check_shape(token, "token", {requests, size});
  check_shape(parent, "parent", {requests, size});
  check_shape(depth, "depth", {requests, size});
  check_shape(score, "score", {requests, size});
  const LedgerBatch ledgers{static_cast<int>(size), span_of(token), span_of(parent), span_of(depth),
                            span_of(score)};
  const TreeBatch batch = trees.batch({});
  nb::gil_scoped_release release;
  prune_batch(pool, static_cast<int>(requests), ledgers, depth_bonus, batch);
}

void pack_arrays(ThreadPool& pool, const std::optional<Lengths>& length, const TreeArrays& trees) {
  const TreeBatch batch = trees.batch(length);
  const int requests = static_cast<int>(trees.requests());
  nb::gil_scoped_release release;
  pack_batch(pool, requests, batch);
}

}  // namespace

void bind_tree(nb::module_& m) {
  nb::class_<TreeArrays>(
      m, "Trees",
      "Arrays for a batch of trees, written in place. bs requests, N nodes with the root.\n\n"
      "token [bs, N] int64, parent [bs, N] int32, depth [bs, N] int32, score [bs, N] float32;\n"
      "optional: position, first_child, next_sibling [bs, N] int64, mask [bs, N, N] bool,\n"
      "mask_bits [bs, N, ceil(N / 64)] uint64 (node j in bit j % 64 of word j // 64).")
      .def(nb::init<Array<int64_t, 2>, Array<int32_t, 2>, Array<int32_t, 2>, Array<float, 2>,
                    std::optional<Array<int64_t, 2>>, std::optional<Array<int64_t, 2>>,
                    std::optional<Array<int64_t, 2>>, std::optional<Array<bool, 3>>,
                    std::optional<Array<uint64_t, 3>>>(),
           "token"_a.noconvert(), "parent"_a.noconvert(), "depth"_a.noconvert(),
           "score"_a.noconvert(), "position"_a.noconvert() = nb::none(),
           "first_child"_a.noconvert() = nb::none(), "next_sibling"_a.noconvert() = nb::none(),
           "mask"_a.noconvert() = nb::none(), "mask_bits"_a.noconvert() = nb::none());

  m.def("prune", &prune_arrays, "pool"_a, "token"_a, "parent"_a, "depth"_a, "score"_a,
        "depth_bonus"_a, "trees"_a,
        "Write the root and the N - 1 best nodes of each ledger [bs, S] into `trees`.\n\n"
        "Raises ValueError if a kept node's parent is not kept: scores rise along a path.");
  m.def("pack", &pack_arrays, "pool"_a, "length"_a.none(), "trees"_a,
        "Write position, links and masks of `trees` from its parent and depth.\n\n"
        "length [bs] int64: committed tokens before each root.");
}

}  // namespace dart
