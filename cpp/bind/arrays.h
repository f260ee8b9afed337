// Arrays that Python hands in, seen as spans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "support/check.h"

namespace dart {

template <typename T, size_t kAxes>
using Array =
    nanobind::ndarray<T, nanobind::ndim<kAxes>, nanobind::c_contig, nanobind::device::cpu>;

template <typename... Args>
auto span_of(const nanobind::ndarray<Args...>& array) {
  using T = typename nanobind::ndarray<Args...>::Scalar;
  return std::span<T>(array.data(), array.size());
}

// Empty where there is no array.
template <typename SomeArray>
auto span_of(const std::optional<SomeArray>& array) {
  return array ? span_of(*array) : decltype(span_of(*array))();
}

// Throws std::invalid_argument unless `array` has this shape; -1 stands for any size.
template <size_t kAxes, typename... Args>
void check_shape(const nanobind::ndarray<Args...>& array, const char* name,
                 const int64_t (&shape)[kAxes]) {
  bool same = true;
  std::string got, expected;
  for (size_t axis = 0; axis < kAxes; ++axis) {
    const auto size = static_cast<int64_t>(array.shape(axis));
    const std::string separator = axis > 0 ? ", " : "";
    same = same && (shape[axis] == -1 || shape[axis] == size);
    got += separator + std::to_string(size);
    expected += separator + (shape[axis] == -1 ? "any" : std::to_string(shape[axis]));
  }
  DART_CHECK(same, name, " has shape [", got, "], expected [", expected, "]");
}

template <size_t kAxes, typename SomeArray>
void check_shape(const std::optional<SomeArray>& array, const char* name,
                 const int64_t (&shape)[kAxes]) {
  if (array) check_shape(*array, name, shape);
}

}  // namespace dart
