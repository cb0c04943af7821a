// The Python module of the ops in cpu/host_ops.h. Importing it also registers the ops of bindings.cpp with torch.
#include <torch/csrc/utils/pybind.h>

#include "cpu/host_ops.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  using namespace sglang_dflash;
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const c10::Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    }
  });
  const py::call_guard<py::gil_scoped_release> others_run;  // other Python threads run during the long ops
  m.attr("SOURCES") = SOURCES;  // their digest, from ops/build_native.py
  m.def("block_layout", block_layout);
  m.def("write_context_kv", write_context_kv, others_run);
  m.def("best_log_probs", best_log_probs, others_run);
}
