"""Headers of the system as a repository of their own, so that they can come before another repository's copies."""

_BUILD = """
cc_library(
    name = "{name}",
    defines = {defines},
    includes = ["include"],
    textual_hdrs = glob(["include/**"]),
    visibility = ["//visibility:public"],
)
"""

def _header_repository_impl(ctx):
    for folder in ctx.attr.headers:
        source = ctx.path("/usr/include/" + folder)
        if not source.exists:
            fail("%s is missing: install its Debian package (./dev does)" % source)
        ctx.symlink(source, "include/" + folder)
    ctx.file("BUILD.bazel", _BUILD.format(name = ctx.name, defines = repr(ctx.attr.defines)))

header_repository = repository_rule(
    implementation = _header_repository_impl,
    local = True,
    attrs = {
        "headers": attr.string_list(mandatory = True, doc = "Folders of /usr/include."),
        "defines": attr.string_list(doc = "Set for everything that depends on it."),
    },
)
