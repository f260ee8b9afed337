#include "support/thread_pool.h"

#include "bind/bind.h"

namespace nb = nanobind;

namespace dart {

void bind_thread_pool(nb::module_& m) {
  m.def("available_cores", &available_cores,
        "Cores that this process may use: its affinity, capped by its cgroup's quota.");
  nb::class_<ThreadPool>(m, "ThreadPool", "Threads that share out the requests of a batch.")
      .def(nb::init<int>(), nb::arg("threads") = 0, "threads = 0 takes available_cores().")
      .def_prop_ro("size", &ThreadPool::size);
}

}  // namespace dart
