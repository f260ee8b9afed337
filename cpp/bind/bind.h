// Shared by the files of bind/, the only ones that include nanobind.
#pragma once

#include <nanobind/nanobind.h>

namespace dart {

void bind_ngram(nanobind::module_& m);
void bind_thread_pool(nanobind::module_& m);
void bind_tree(nanobind::module_& m);
void bind_grow(nanobind::module_& m);

}  // namespace dart
