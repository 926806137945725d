"""Writes internal/ingest/enginehttp/testdata/sglang.json: sglang_http_goldens.py WHEEL... > sglang.json

A case is the body of /server_info for a configuration. The descriptor kv_events, with defaults and refusals, comes from the release's
own code, which wheel.py reads from the wheel. The script defines the other settings under the names of ServerArgs, and omits settings
that the release lacks. The rest of /server_info, some 400 settings, is omitted.
"""
import ast
import json
import re
import sys
import types
import zipfile

import wheel


def function(archive, path, name):
    """Returns the source of a function or method in a module, or None."""
    if path not in archive.namelist():
        return None
    for node in ast.walk(ast.parse(archive.read(path))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.args.args = [ast.arg(a.arg) for a in node.args.args]
            node.returns, node.decorator_list = None, []
            return ast.unparse(node)
    return None


def release(path):
    archive = zipfile.ZipFile(path)
    version = re.search(r"sglang-([0-9.]+)-", path).group(1)
    fields = "".join(archive.read(n).decode() for n in archive.namelist()
                     if n == "sglang/srt/server_args.py" or n.startswith("sglang/srt/arg_groups/fields/"))
    if finder := wheel.finder:
        sys.meta_path.remove(finder)
        for name in [m for m in sys.modules if m.split(".")[0] == "sglang"]:
            del sys.modules[name]
    wheel.open_wheel(path, {"sglang.srt.disaggregation.kv_events", "sglang.srt.utils.network"})
    scope = {"num_dp_ranks_of": lambda c: c.dp_size * c.attn_dp_size}
    describe = (function(archive, "sglang/srt/runtime_context.py", "describe_kv_events_publisher")
                or function(archive, "sglang/srt/server_args.py", "describe_kv_events_publisher"))
    if describe:
        exec(describe, scope)
    width = function(archive, "sglang/srt/arg_groups/overrides.py", "kv_event_block_size_of")
    if width:
        exec(width, scope)
        overrides = types.ModuleType("sglang.srt.arg_groups.overrides")
        overrides.kv_event_block_size_of, overrides.resolving_view = scope["kv_event_block_size_of"], lambda args: args
        sys.modules[overrides.__name__] = overrides
    elif size := function(archive, "sglang/srt/server_args.py", "kv_event_block_size"):
        exec(size, scope)

    def info(**settings):
        args = dict(model_path="/models/llama", served_model_name="llama", page_size=16, dp_size=1, dcp_size=1, kv_events_config=None)
        args.update(settings)
        args = {k: v for k, v in args.items() if re.search(rf"^    {k}: ", fields, re.M)}
        out = dict(args, version=version, status="ready")
        if describe:
            view = types.SimpleNamespace(**dict(dict(attn_dp_size=1, dcp_size=1, load_publish_endpoint=None), **args))
            if "kv_event_block_size" in scope:
                view.kv_event_block_size = scope["kv_event_block_size"](view)
            out["kv_events"] = scope["describe_kv_events_publisher"](view)
        return out

    def config(**c):
        return json.dumps(dict(publisher="zmq", **c))

    return {
        "plain": info(kv_events_config=config(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5657", topic="kv-events")),
        "eight ranks": info(dp_size=8, page_size=64, kv_events_config=config(endpoint="tcp://0.0.0.0:5557", replay_endpoint="tcp://0.0.0.0:5657")),
        "context parallel": info(dcp_size=2, kv_events_config=config(endpoint="tcp://*:5557")),
        "no name": info(served_model_name=None, kv_events_config=config()),
        "dials out": info(kv_events_config=config(endpoint="tcp://10.0.0.9:5557")),
        "ipc": info(kv_events_config=config(endpoint="ipc:///tmp/events")),
        "adapters": info(kv_events_config=config(), enable_lora=True, lora_paths=[dict(lora_id="0" * 32, lora_name="sql", lora_path="/models/sql", pinned=False)]),
        "adapters, dynamo": info(kv_events_config=config(format="dynamo"), enable_lora=True, lora_paths=None),
        "null": info(kv_events_config=json.dumps(dict(publisher="null"))),
        "no events": info(),
    }


print(json.dumps({re.search(r"sglang-([0-9.]+)-", path).group(1): release(path) for path in sys.argv[1:]}, indent=1))
