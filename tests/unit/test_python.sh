#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# python/ep_overlap on the host engine: the structs have the header's layout, and a call through them
# arrives. Where PYTHON (python3) has torch, also MoELayer and the deep_ep drop-in on the CPU.
set -u
top=$(cd "${top_builddir:-.}" && pwd)
src=$(cd "${srcdir:-.}" && pwd)
command -v python3 >/dev/null || { echo "left out: no python3" && exit 77; }
work=$(mktemp -d) || exit 99
trap 'rm -rf "$work"' EXIT
failed=0

# ---- layout: offsets and sizes by the compiler against ctypes ----
PYTHONPATH=$src/python PYTHONDONTWRITEBYTECODE=1 python3 - "$work/layout.c" "$work/python" <<'P' || exit 1
import importlib.util, sys, types
package = types.ModuleType("ep_overlap")  # (its __init__ needs torch)
spec = importlib.util.find_spec("ep_overlap")
package.__path__ = list(spec.submodule_search_locations)
sys.modules["ep_overlap"] = package
from ep_overlap import _capi as c
structs = {"epo_bootstrap": c.Bootstrap, "epo_group_config": c.GroupConfig, "epo_group_info": c.GroupInfo,
           "epo_buffer_config": c.BufferConfig, "epo_routing": c.Routing, "epo_layer_config": c.LayerConfig,
           "epo_plan_info": c.PlanInfo, "epo_stats": c.Stats}
with open(sys.argv[1], "w") as f, open(sys.argv[2], "w") as p:
    f.write('#include "ep_overlap.h"\n#include <stdio.h>\nint main(void) {\n')
    for name, struct in structs.items():
        # (the header's may have more behind what we use: its size says what we know)
        f.write('printf("%s %%d\\n", %d <= (int)sizeof(%s));\n' % (name, __import__("ctypes").sizeof(struct), name))
        p.write("%s 1\n" % name)
        for field, _ in struct._fields_:
            f.write('printf("%s.%s %%zu\\n", offsetof(%s, %s));\n' % (name, field, name, field))
            p.write("%s.%s %d\n" % (name, field, getattr(struct, field).offset))
    f.write("return 0; }\n")
P
if ${CC:-cc} -I "$src/lib/include" -o "$work/layout" "$work/layout.c" && "$work/layout" >"$work/c" &&
    diff "$work/c" "$work/python"; then
    echo "ok: structs as the header has them ($(wc -l <"$work/c") places)"
else
    echo "FAILED: structs as the header has them"
    failed=1
fi

# ---- one rank on the host engine ----
library=$top/.libs/libep_overlap.so.0
[ -e "$top/.libs/engine_host.so" ] || { echo "left out: calls (no host engine in this build)" && exit $failed; }
mkdir -p "$work/lib/ep-overlap"
cp "$library" "$work/lib/" && cp "$top/.libs/engine_host.so" "$work/lib/ep-overlap/"
if nm -D "$library" | grep -q '__[atu]san_'; then
    echo "left out in a sanitized build: calls"
    exit $failed
fi
cat >"$work/calls.py" <<'P'
import array, importlib.util, sys, types
from ctypes import byref, c_uint64, c_void_p
package = types.ModuleType("ep_overlap")
package.__path__ = list(importlib.util.find_spec("ep_overlap").submodule_search_locations)
sys.modules["ep_overlap"] = package
from ep_overlap import _capi as c
T, H, E, K = 5, 4, 3, 2
group = c.create("epo_group_create", byref(c.GroupConfig(engine=c.ENGINE_HOST, rank=-1, ranks=-1, overlap=c.ON, dispatcher=c.ALLTOALL, delay_wgrad=c.OFF)))
info = c.GroupInfo()
c.check(c.library().epo_group_query(group, byref(info)))
assert info.engine == b"host" and info.ranks == 1 and info.overlap == 1, info.engine
buffer = c.create("epo_buffer_create", group, byref(c.BufferConfig(experts=E, hidden=H, top_k=K, max_tokens=T, type=c.F32, dispatcher=-1, capacity=-1)))
at = lambda a: a.buffer_info()[0]
experts = array.array("q", [t % E if k == 0 else (t + 1) % E if t != 2 else -1 for t in range(T) for k in range(K)])
weights = array.array("f", [1.0] * (T * K))
plan = c.create("epo_plan_create", buffer, byref(c.Routing(tokens=T, top_k=K, experts=at(experts), weights=at(weights))), None)
rows = c_uint64()
c.check(c.library().epo_plan_rows(plan, byref(rows)))
first, counts = c.plan_experts(plan, E)
assert sum(counts) == T * K - 1 and first[0] == 0, (first, counts)
x = array.array("f", [float(t * 10 + h) for t in range(T) for h in range(H)])
r = array.array("f", [9.0] * (rows.value * H))
w = array.array("f", [9.0] * rows.value)
c.check(c.library().epo_dispatch(plan, at(x), at(r), at(w), None))
y = array.array("f", [9.0] * (T * H))
c.check(c.library().epo_combine(plan, at(r), at(y), None, None, None))
for t in range(T):
    for h in range(H):
        assert y[t * H + h] == (1 if t == 2 else 2) * x[t * H + h], (t, h, y[t * H + h])
try:
    c.create("epo_buffer_create", group, byref(c.BufferConfig(experts=E, hidden=-1, top_k=K, max_tokens=T, capacity=-1)))
    raise SystemExit("hidden=-1 was accepted")
except ValueError as e:
    assert "hidden" in str(e), e
c.library().epo_plan_release(plan)
c.check(c.library().epo_buffer_destroy(buffer))
c.check(c.library().epo_group_destroy(group))
P
if PYTHONPATH=$src/python PYTHONDONTWRITEBYTECODE=1 EP_OVERLAP_LIBRARY=$work/lib/libep_overlap.so.0 \
    timeout 60 env -u RANK -u WORLD_SIZE python3 "$work/calls.py"; then
    echo "ok: dispatch and combine of one rank"
else
    echo "FAILED: dispatch and combine of one rank"
    failed=1
fi

# ---- a library that is not there, or not this package's ----
cat >"$work/open.py" <<'P'
import importlib.util, sys, types
package = types.ModuleType("ep_overlap")
package.__path__ = list(importlib.util.find_spec("ep_overlap").submodule_search_locations)
sys.modules["ep_overlap"] = package
from ep_overlap import _capi as c
try:
    c.library()
    raise SystemExit("opened")
except ImportError as e:
    print(e)
P
opened() { # LIBRARY PART: what is said of it
    local said
    said=$(PYTHONPATH=$src/python PYTHONDONTWRITEBYTECODE=1 EP_OVERLAP_LIBRARY=$1 timeout 60 python3 "$work/open.py" 2>&1)
    case $said in
    *"$2"*) echo "ok: $2" ;;
    *)
        echo "$said"
        echo "FAILED: $1: $2"
        failed=1
        ;;
    esac
}
echo 'const char *epo_version(void); const char *epo_version(void) { return "0.0.9"; }' >"$work/old.c"
echo 'int other; int other;' >"$work/other.c"
if ${CC:-cc} -shared -fPIC -o "$work/old.so" "$work/old.c" && ${CC:-cc} -shared -fPIC -o "$work/other.so" "$work/other.c"; then
    opened "$work/none.so" "EP_OVERLAP_LIBRARY=$work/none.so was not opened"
    opened "$work/old.so" "has no epo_group_create (its version is 0.0.9): install the library and the Python package of the same release"
    opened "$work/other.so" "has no epo_group_create (it has no epo_version at all)"
else
    echo "FAILED: the libraries of another release"
    failed=1
fi

python=${PYTHON:-python3}

# ---- the package, as pip makes it of the tree: the binding with its hints, not the drop-in ----
# (no network: with the setuptools that is there; before 70.1 that needs wheel)
if "$python" -c 'import setuptools, pip; assert int(setuptools.__version__.split(".")[0]) > 70 or __import__("wheel")' 2>/dev/null; then
    cp -r "$src/python" "$work/tree" && chmod -R u+w "$work/tree"
    wants='ep_overlap/__init__.py ep_overlap/_capi.py ep_overlap/layer.py ep_overlap/ops.py ep_overlap/py.typed'
    if "$python" -m pip wheel -q --no-index --no-deps --no-build-isolation -w "$work/wheel" "$work/tree" >"$work/said" 2>&1 &&
        found=$("$python" -m zipfile -l "$work"/wheel/ep_overlap-*-py3-none-any.whl | awk '/^ep_overlap\/|^deep_ep/ {print $1}' | sort | tr '\n' ' ') &&
        [ "${found% }" = "$wants" ] &&
        "$python" -m pip install -q --no-index --no-deps --target "$work/site" "$work"/wheel/*.whl >>"$work/said" 2>&1 &&
        (cd / && PYTHONPATH=$work/site PYTHONDONTWRITEBYTECODE=1 EP_OVERLAP_LIBRARY=$work/lib/libep_overlap.so.0 \
            timeout 60 env -u RANK -u WORLD_SIZE "$python" "$work/calls.py" >>"$work/said" 2>&1); then
        echo "ok: the package is made, installed and used: $found"
    else
        tail -n 30 "$work/said"
        echo "FAILED: the package: found ${found:-nothing}, needed is $wants"
        failed=1
    fi
else
    echo "left out: the package ($python has no setuptools that makes wheels)"
fi

# ---- with torch: two ranks on the host engine ----
if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "left out: MoELayer and deep_ep on the CPU ($python has no torch)"
    exit $failed
fi
# ---- type hints, where there is mypy ----
if "$python" -c 'import mypy' 2>/dev/null; then
    for package in "ep_overlap --strict" deep_ep; do
        # shellcheck disable=SC2086
        if (cd "$src" && MYPYPATH=python:python/dropin "$python" -m mypy --cache-dir "$work/mypy" -p $package) \
            >"$work/said" 2>&1; then
            echo "ok: type hints of $package"
        else
            tail -n 30 "$work/said"
            echo "FAILED: type hints of $package"
            failed=1
        fi
    done
else
    echo "left out: type hints ($python has no mypy)"
fi
for program in unit/test_python_edges unit/test_deep_ep_pack unit/test_deep_ep_streams gpu/python_deep_ep gpu/python_layer; do
    if [ $program = unit/test_deep_ep_pack ] && ! "$python" -c 'import triton' 2>/dev/null; then
        echo "left out: $program (no Triton)"
    elif PYTHONPATH=$src/python:$src/python/dropin PYTHONDONTWRITEBYTECODE=1 CUDA_VISIBLE_DEVICES='' \
        EP_OVERLAP_LIBRARY=$work/lib/libep_overlap.so.0 timeout 250 env -u RANK -u WORLD_SIZE \
        "$python" "$src/tests/$program.py" >"$work/said" 2>&1; then
        echo "ok: $program"
    else
        tail -n 30 "$work/said"
        echo "FAILED: $program"
        failed=1
    fi
done

# ---- the examples: alone, also where a batch script starts them without srun ----
alone() { # PROGRAM ARGUMENT...
    local program=$1
    shift
    PYTHONPATH=$src/python PYTHONDONTWRITEBYTECODE=1 CUDA_VISIBLE_DEVICES='' EP_OVERLAP_LIBRARY=$work/lib/libep_overlap.so.0 \
        timeout 120 env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u SLURM_STEP_NUM_TASKS MASTER_PORT=$((20000 + $$ % 10000)) \
        SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8 "$python" "$src/python/examples/$program.py" "$@" >"$work/said" 2>&1
}
small=(--steps 2 --tokens 64 --hidden 64 --ffn 32 --experts 4)
if alone torch_moe "${small[@]}" && first=$(grep -o 'lm loss: .*' "$work/said") && alone torch_moe --layer ep_overlap "${small[@]}" &&
    [ "$(grep -c 'iteration .*lm loss: [0-9.E+-]* |' "$work/said")" = 2 ] &&
    [ "$(grep -o 'lm loss: [0-9.]\{5\}' "$work/said")" = "$(grep -o 'lm loss: [0-9.]\{5\}' <<<"$first")" ]; then
    echo "ok: torch_moe alone, both layers: the same losses"
else
    tail -n 30 "$work/said"
    echo "FAILED: torch_moe alone, both layers"
    failed=1
fi
if alone torch_alltoall --sizes 0.1 --loops 2 && grep -q '^every element as its sender sent it' "$work/said"; then
    echo "ok: torch_alltoall alone"
else
    tail -n 30 "$work/said"
    echo "FAILED: torch_alltoall alone"
    failed=1
fi
exit $failed
