"""LibTorch and the CUDA runtime, from the wheel that a Python has installed."""

_BUILD = """
# The libraries are linked by path and never listed as inputs: Bazel would copy them to a folder of its own, where
# they no longer find their neighbours through $ORIGIN.

cc_library(
    name = "torch",
    defines = ["AT_PER_OPERATOR_HEADERS"],  # LibTorch's headers then include the operators that they use, not all
    includes = [
        "include",
        "include/torch/csrc/api/include",
    ],
    linkopts = [
        "-L{torch}/lib",
        "-Wl,-rpath,{torch}/lib",
        "-Wl,--no-as-needed",  # libtorch_cuda registers itself when loaded; no symbol of it is named
        # First: libtorch_cpu exports old std::filesystem symbols that would stand in front of the library's own, and
        # with them std::filesystem::remove_all jumps to address 0.
        "-lstdc++",
        "-ltorch",
        "-ltorch_cpu",
        "-ltorch_cuda",
        "-lc10",
        "-lc10_cuda",
        "-Wl,--as-needed",
    ],
    textual_hdrs = glob(["include/**"]),
    visibility = ["//visibility:public"],
    deps = [":cudart"],
)

cc_library(
    name = "cudart",
    includes = ["cuda_include"],
    linkopts = [
        "-L{cuda}/lib",
        "-Wl,-rpath,{cuda}/lib",
        "-l:libcudart.so.13",
    ],
    textual_hdrs = glob(["cuda_include/**"]),
    visibility = ["//visibility:public"],
)
"""

def _torch_repository_impl(ctx):
    python = ctx.os.environ.get("LIBTORCH_PYTHON")
    if not python:
        fail("LIBTORCH_PYTHON is not set: build with ./dev, or pass --repo_env=LIBTORCH_PYTHON=<a Python that has torch>")
    found = ctx.execute([
        python,
        "-c",
        "import importlib.util as u, sys; t = u.find_spec('torch'); print(t.submodule_search_locations[0] if t else sys.exit('none'))",
    ])
    if found.return_code != 0:
        fail("%s has no torch (%s)" % (python, found.stderr.strip()))
    torch = ctx.path(found.stdout.strip())
    cuda = torch.dirname.get_child("nvidia").get_child("cu13")
    for needed in [torch.get_child("lib").get_child("libtorch_cuda.so"), cuda.get_child("lib").get_child("libcudart.so.13")]:
        if not needed.exists:
            fail("%s does not exist: the torch of %s was not built for CUDA 13 (see third_party/requirements.txt)" % (needed, python))

    for header, wheel in {"crt/host_config.h": "nvidia-cuda-crt", "nv/target": "nvidia-cuda-cccl"}.items():
        if not ctx.path("%s/include/%s" % (cuda, header)).exists:
            fail("%s/include has no %s: install %s for %s (see third_party/requirements.txt)" % (cuda, header, wheel, python))

    ctx.symlink(torch.get_child("include"), "include")
    ctx.symlink(cuda.get_child("include"), "cuda_include")
    ctx.file("BUILD.bazel", _BUILD.format(torch = torch, cuda = cuda))

torch_repository = repository_rule(
    implementation = _torch_repository_impl,
    environ = ["LIBTORCH_PYTHON"],
    local = True,
)
