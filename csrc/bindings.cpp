// Python bindings: pointers, sizes, dtype enums and a stream; no framework. The Python side checks and allocates.
//
// A tensor argument is None or a tuple (pointer, elements between samples, dtype enum). `device` picks the library:
// 0 = CPU (stream = number of threads), 1 = CUDA (stream = cudaStream_t as an integer).
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "cpu.h"
#if defined(PG_CUDA)
#include "cuda.h"
#endif

namespace py = pybind11;
using namespace prefgrpo;

namespace {

int64_t integer(py::handle h) {
  const long long v = PyLong_AsLongLong(h.ptr());
  if (v == -1 && PyErr_Occurred()) throw py::error_already_set();
  return v;
}

View view(const py::object& t) {
  if (t.is_none()) return {};
  if (!PyTuple_Check(t.ptr()) || PyTuple_GET_SIZE(t.ptr()) != 3)
    throw py::type_error("expected (pointer, stride, dtype) or None");
  View v;
  v.data = reinterpret_cast<void*>(integer(PyTuple_GET_ITEM(t.ptr(), 0)));
  v.stride = integer(PyTuple_GET_ITEM(t.ptr(), 1));
  v.dtype = static_cast<int32_t>(integer(PyTuple_GET_ITEM(t.ptr(), 2)));
  return v;
}

template <class T>
T* at(uintptr_t p) {
  return reinterpret_cast<T*>(p);
}

// Runs without the GIL, on the library that `device` names.
template <class Params, class Cpu, class Cuda>
void launch(int device, Params& p, uintptr_t stream, Cpu cpu_launch, [[maybe_unused]] Cuda cuda_launch) {
  if (device == 0) {
    py::gil_scoped_release release;
    cpu_launch(p, nullptr);
    return;
  }
#if defined(PG_CUDA)
  const char* error = cuda_launch(p, at<void>(stream));
  if (error) throw std::runtime_error(std::string("CUDA launch failed: ") + error);
#else
  (void)stream;
  throw std::runtime_error("this build has no CUDA kernels; rebuild where nvcc is found");
#endif
}

#if defined(PG_CUDA)
#define PG_LAUNCH(device, p, stream, name) launch(device, p, stream, cpu::launch_##name, cuda::launch_##name)
#else
#define PG_LAUNCH(device, p, stream, name) launch(device, p, stream, cpu::launch_##name, 0)
#endif

// (seed, sample pointer, step pointer, offset) or None
NoiseAddress address(const py::object& t) {
  NoiseAddress a;
  if (t.is_none()) return a;
  const auto s = py::reinterpret_borrow<py::tuple>(t);
  a.seed = PyLong_AsUnsignedLongLongMask(s[0].ptr());
  a.sample = reinterpret_cast<const int64_t*>(integer(s[1]));
  a.step = reinterpret_cast<const int64_t*>(integer(s[2]));
  a.offset = integer(s[3]);
  return a;
}

AffineParams affine(int64_t batch, int64_t dim, const py::object& x, const py::object& v, const py::object& u,
                    const py::tuple& g, uintptr_t coef, int64_t rows, uintptr_t index, const py::object& out) {
  AffineParams p;
  p.batch = batch, p.dim = dim, p.x = view(x), p.v = view(v), p.u = view(u), p.out = view(out);
  p.guidance = g[0].cast<float>(), p.from_cond = g[1].cast<bool>(), p.rescale_dim = g[2].cast<int64_t>();
  p.coef = at<float>(coef), p.rows = rows, p.index = at<int64_t>(index);
  return p;
}

void affine_step(int device, int64_t batch, int64_t dim, py::object x, py::object v, py::object u, py::tuple guidance,
                 uintptr_t coef, int64_t rows, uintptr_t index, py::object out, py::object eps, py::object noise,
                 py::object mean, py::object x0, uintptr_t sigma, py::object copy, uintptr_t logp, uintptr_t partial,
                 uintptr_t ticket, uintptr_t stream) {
  AffineParams p = affine(batch, dim, x, v, u, guidance, coef, rows, index, out);
  p.eps = view(eps), p.noise = address(noise), p.mean = view(mean), p.x0 = view(x0), p.sigma = at<float>(sigma);
  p.copy = view(copy), p.logp = at<float>(logp), p.partial = at<double>(partial), p.ticket = at<uint32_t>(ticket);
  p.threads = static_cast<int32_t>(stream);
  PG_LAUNCH(device, p, stream, affine_step);
}

void affine_logp(int device, int64_t batch, int64_t dim, py::object x, py::object v, py::object u, py::tuple guidance,
                 uintptr_t coef, int64_t rows, uintptr_t index, py::object x_next, py::object v_ref, py::object v_old,
                 uintptr_t logp, uintptr_t kl, uintptr_t guard, uintptr_t partial, uintptr_t ticket, uintptr_t stream) {
  AffineParams p = affine(batch, dim, x, v, u, guidance, coef, rows, index, x_next);
  p.v_ref = view(v_ref), p.v_old = view(v_old), p.logp = at<float>(logp), p.kl = at<float>(kl),
  p.guard = at<float>(guard);
  p.partial = at<double>(partial), p.ticket = at<uint32_t>(ticket), p.threads = static_cast<int32_t>(stream);
  PG_LAUNCH(device, p, stream, affine_logp);
}

void affine_grad(int device, int64_t batch, int64_t dim, py::object x, py::object v, py::object u, py::tuple guidance,
                 uintptr_t coef, int64_t rows, uintptr_t index, py::object x_next, py::object v_ref, py::object v_old,
                 uintptr_t g_logp, uintptr_t g_kl, uintptr_t g_guard, py::object dv, py::object du, uintptr_t stream) {
  AffineParams p = affine(batch, dim, x, v, u, guidance, coef, rows, index, x_next);
  p.v_ref = view(v_ref), p.v_old = view(v_old), p.g_logp = at<float>(g_logp), p.g_kl = at<float>(g_kl),
  p.g_guard = at<float>(g_guard);
  p.dv = view(dv), p.du = view(du), p.threads = static_cast<int32_t>(stream);
  PG_LAUNCH(device, p, stream, affine_grad);
}

#if defined(PG_CUDA)
void guide(int64_t batch, int64_t dim, py::object c, py::object u, py::tuple guidance, py::object dv, py::object out,
           py::object du, uintptr_t stream) {
  AffineParams p = affine(batch, dim, py::none(), c, u, guidance, 0, 0, 0, out);
  const bool backward = !dv.is_none();
  p.eps = view(dv), p.dv = view(out), p.du = view(du);
  const char* error = (backward ? cuda::launch_guide_grad : cuda::launch_guide)(p, at<void>(stream));
  if (error) throw std::runtime_error(std::string("CUDA launch failed: ") + error);
}
#endif

void normal(int device, int64_t batch, int64_t dim, py::object noise, py::object out, uintptr_t stream) {
  NormalParams p;
  p.batch = batch, p.dim = dim, p.noise = address(noise), p.out = view(out), p.threads = static_cast<int32_t>(stream);
  PG_LAUNCH(device, p, stream, normal);
}

void policy(int device, int64_t batch, uintptr_t logp, uintptr_t logp_old, uintptr_t advantage, uintptr_t weight,
            uintptr_t mask, uintptr_t kl, uintptr_t log_ratio, float clip_low, float clip_high, float adv_clip,
            float kl_coef, double denominator, uintptr_t loss, uintptr_t metrics, uintptr_t d_delta, uintptr_t d_kl,
            uintptr_t stream) {
  PolicyParams p;
  p.batch = batch, p.logp = at<float>(logp), p.logp_old = at<float>(logp_old), p.advantage = at<float>(advantage);
  p.weight = at<float>(weight), p.mask = at<uint8_t>(mask), p.kl = at<float>(kl), p.log_ratio = at<float>(log_ratio);
  p.clip_low = clip_low, p.clip_high = clip_high, p.adv_clip = adv_clip, p.kl_coef = kl_coef,
  p.denominator = denominator;
  p.loss = at<float>(loss), p.metrics = at<float>(metrics), p.d_delta = at<float>(d_delta), p.d_kl = at<float>(d_kl);
  PG_LAUNCH(device, p, stream, policy);
}

void group_advantage(int device, int64_t rewards, int64_t batch, uintptr_t values, int dtype, uintptr_t group,
                     uintptr_t weights, int combine, int std_mode, double eps, int ddof, bool rank, bool batch_norm,
                     uintptr_t scratch, uintptr_t advantage, uintptr_t stream) {
  AdvantageParams p;
  p.rewards = rewards, p.batch = batch, p.values = at<void>(values), p.dtype = dtype, p.group = at<int64_t>(group);
  p.weights = at<double>(weights), p.combine = combine, p.std_mode = std_mode, p.eps = eps, p.ddof = ddof,
  p.rank = rank;
  p.batch_norm = batch_norm, p.scratch = at<double>(scratch), p.advantage = at<float>(advantage);
  PG_LAUNCH(device, p, stream, advantage);
}

void winrate_advantage(int device, int64_t prompts, int64_t group, uintptr_t wins, uintptr_t counts, int dtype,
                       int std_mode, double eps, int ddof, uintptr_t rate, uintptr_t advantage, uintptr_t scratch,
                       uintptr_t stream) {
  WinrateParams p;
  p.scratch = at<double>(scratch);
  p.prompts = prompts, p.group = group, p.wins = at<void>(wins), p.counts = at<void>(counts), p.dtype = dtype;
  p.std_mode = std_mode, p.eps = eps, p.ddof = ddof, p.rate = at<float>(rate), p.advantage = at<float>(advantage);
  PG_LAUNCH(device, p, stream, winrate);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "prefgrpo's compiled kernels over raw pointers; use prefgrpo.ops";
#if defined(PG_CUDA)
  m.attr("cuda_archs") = PG_CUDA;
  m.def("guide", &guide, "guided velocity in fp32, or with dv its gradient in c and u");
  m.def("partials", &cuda::partials_of, "CUDA scratch doubles per sample and plane");
#else
  m.attr("cuda_archs") = "";
#endif
  m.attr("max_rescale_dim") = kMaxRescaleDim;
  m.def("isa", &cpu::isa, "instruction set of the CPU kernels in use");
  m.def("use_isa", &cpu::use_isa, "choose plain, avx2 or avx512; False if unavailable");
  m.def("affine_step", &affine_step);
  m.def("affine_logp", &affine_logp);
  m.def("affine_grad", &affine_grad);
  m.def("normal", &normal);
  m.def("policy", &policy);
  m.def("group_advantage", &group_advantage);
  m.def("winrate_advantage", &winrate_advantage);
}
