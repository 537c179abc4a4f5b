// Python bindings: the module reads torch tensors through their Python methods; it links neither torch nor libcuda.
//
// The Python side (prefgrpo/ops) checks and allocates. A function takes the number of threads (cpu_) or the stream
// (cuda_), then a dict with every field of its struct in kernels.h. The GIL is released while a kernel runs or is
// launched.
#include <pybind11/pybind11.h>

#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"

namespace py = pybind11;
using namespace prefgrpo;

static py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

static int64_t number(py::handle tensor, const char* method) { return tensor.attr(method)().cast<int64_t>(); }

static void* pointer_of(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  const uintptr_t address = checked(PyObject_CallMethodNoArgs(tensor.ptr(), name)).cast<uintptr_t>();
  // A tensor without memory (fake, functional, meta) points at its offset from null; memory begins far above.
  if (address < uintptr_t{1} << 31 && number(tensor, "numel") != 0 &&
      address == static_cast<uintptr_t>(number(tensor, "storage_offset") * number(tensor, "element_size")))
    throw py::type_error(
        "expected a tensor in memory, got one without data: " + py::repr(py::type::of(tensor)).cast<std::string>() +
        " on " + py::str(tensor.attr("device")).cast<std::string>());
  return reinterpret_cast<void*>(address);
}

static int32_t dtype_of(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("dtype");
  static PyObject* const dtypes[] = {// in the order of DType; kept for ever
                                     py::object(py::module_::import("torch").attr("float32")).release().ptr(),
                                     py::object(py::module_::import("torch").attr("bfloat16")).release().ptr(),
                                     py::object(py::module_::import("torch").attr("float64")).release().ptr()};
  const py::object dtype = checked(PyObject_GetAttr(tensor.ptr(), name));
  for (int32_t k = 0; k < 3; ++k)
    if (dtype.ptr() == dtypes[k]) return k;
  throw py::type_error("expected fp32, bf16 or fp64, got " + py::str(dtype).cast<std::string>());
}

// A number, or a tensor: its address, or a View of it; None is null.
template <class T>
static T read(py::handle value) {
  if constexpr (std::is_arithmetic_v<T>) return value.cast<T>();
  if constexpr (std::is_same_v<T, View>)
    return value.is_none() ? View{} : View{static_cast<char*>(pointer_of(value)), dtype_of(value)};
  if constexpr (std::is_pointer_v<T>) return value.is_none() ? nullptr : static_cast<T>(pointer_of(value));
}

template <class Params>
struct Field {
  PyObject* name;  // interned, kept for ever
  void (*set)(Params&, py::handle);
};

// Adds a field under a name, if `Params` has it.
#define PG_NAMED(name, field)                        \
  if constexpr (requires(Params p) { p.field; })     \
    all.push_back({PyUnicode_InternFromString(name), \
                   [](Params& p, py::handle value) { p.field = read<decltype(p.field)>(value); }});
#define PG_FIELD(field) PG_NAMED(#field, field)

// The fields of any struct in kernels.h.
template <class Params>
static std::vector<Field<Params>> fields_of() {
  std::vector<Field<Params>> all;
  // clang-format off
  PG_FIELD(batch) PG_FIELD(dim) PG_FIELD(size) PG_FIELD(x) PG_FIELD(v) PG_FIELD(coef) PG_FIELD(rows) PG_FIELD(index)
  PG_FIELD(y) PG_FIELD(v_ref) PG_FIELD(v_old) PG_FIELD(logp) PG_FIELD(kl) PG_FIELD(log_ratio) PG_FIELD(partial)
  PG_FIELD(g_logp) PG_FIELD(g_kl) PG_FIELD(g_log_ratio) PG_FIELD(dv) PG_FIELD(eps) PG_FIELD(mean) PG_FIELD(out)
  PG_NAMED("seed", noise.seed) PG_NAMED("sample", noise.sample) PG_NAMED("step", noise.step)
  PG_NAMED("number", noise.number) PG_NAMED("offset", noise.offset)
  PG_FIELD(logp_old) PG_FIELD(advantage) PG_FIELD(weight) PG_FIELD(epsilon_low) PG_FIELD(epsilon_high)
  PG_FIELD(adv_clip) PG_FIELD(kl_coef) PG_FIELD(denominator) PG_FIELD(per_sample) PG_FIELD(loss) PG_FIELD(metrics)
  PG_FIELD(d_logp) PG_FIELD(d_kl)
  PG_FIELD(prompts) PG_FIELD(group) PG_FIELD(wins) PG_FIELD(counts) PG_FIELD(use_std) PG_FIELD(ddof) PG_FIELD(rate)
      // clang-format on
      return all;
}

template <class Params>
static void def(py::module_& m, const std::string& name, void (*run)(const Params&, int64_t)) {
  m.def(name.c_str(), [run, name, fields = fields_of<Params>()](int64_t where, const py::dict& given) {
    Params p;
    for (const Field<Params>& field : fields) {
      PyObject* value = PyDict_GetItemWithError(given.ptr(), field.name);
      if (!value) throw py::type_error(name + ": " + py::str(field.name).cast<std::string>() + " is missing");
      field.set(p, value);
    }
    if (given.size() > fields.size()) throw py::type_error(name + ": more than its fields, of kernels.h");
    const py::gil_scoped_release release;
    run(p, where);
  });
}

static void add_ops(py::module_& m, const std::string& where, const Kernels& run) {
  def(m, where + "sde_step", run.sde_step);
  def(m, where + "sde_logp", run.sde_logp);
  def(m, where + "sde_grad", run.sde_grad);
  def(m, where + "normal", run.normal);
  def(m, where + "policy_loss", run.policy_loss);
  def(m, where + "winrate", run.winrate);
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "prefgrpo's compiled kernels; use prefgrpo.ops";
  add_ops(m, "cpu_", cpu::kernels);
#if defined(PG_X86)  // cpu.cpp is compiled for these
  m.attr("cpu_runs") = static_cast<bool>(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
#else
  m.attr("cpu_runs") = true;
#endif
#if defined(PG_CUDA)
  add_ops(m, "cuda_", cuda::kernels);
  m.attr("cuda_archs") = PG_CUDA;
  m.def("partials", &cuda::partials_of);
#else
  m.attr("cuda_archs") = "";
#endif
}
