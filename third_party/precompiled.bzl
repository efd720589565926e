"""A precompiled header. It halves the time of a test, most of which is LibTorch's headers."""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _precompiled_header_impl(ctx):
    header = ctx.actions.declare_file(ctx.label.name + ".h")
    ctx.actions.write(header, "".join(["#include <%s>\n" % each for each in ctx.attr.includes]))

    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    merged = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    context = merged.compilation_context

    # g++ takes the precompiled header beside the header, if the flags are those of the file that includes it.
    precompiled = ctx.actions.declare_file(ctx.label.name + ".h.gch")
    variables = cc_common.create_compile_variables(
        cc_toolchain = toolchain,
        feature_configuration = features,
        source_file = header.path,
        output_file = precompiled.path,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts,
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        use_pic = True,
    )
    flags = cc_common.get_memory_inefficient_command_line(
        action_name = CPP_COMPILE_ACTION_NAME,
        feature_configuration = features,
        variables = variables,
    )
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(
            action_name = CPP_COMPILE_ACTION_NAME,
            feature_configuration = features,
        ),
        arguments = ["-x", "c++-header"] + flags,
        env = cc_common.get_environment_variables(
            action_name = CPP_COMPILE_ACTION_NAME,
            feature_configuration = features,
            variables = variables,
        ),
        inputs = depset([header], transitive = [context.headers, toolchain.all_files]),
        outputs = [precompiled],
        mnemonic = "CppPrecompile",
        progress_message = "Compiling %s" % header.short_path,
    )

    own = cc_common.create_compilation_context(headers = depset([header, precompiled]))
    return [
        DefaultInfo(files = depset([header, precompiled])),
        cc_common.merge_cc_infos(direct_cc_infos = [CcInfo(compilation_context = own)], cc_infos = [merged]),
    ]

# Whoever depends on it adds copts = precompiled(its label) to have it included first.
precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "copts": attr.string_list(doc = "Those of the files that will include it."),
        "deps": attr.label_list(providers = [CcInfo]),
        "includes": attr.string_list(mandatory = True, doc = "What it includes, in this order."),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

# How tests are compiled: what they test is optimized, and they need not be.
TEST_COPTS = ["-O0"]

def precompiled(name):
    """The flags that include the precompiled header of third_party/ that has this name before anything else."""
    return ["-include", "$(GENDIR)/third_party/%s.h" % name, "-Winvalid-pch"]
