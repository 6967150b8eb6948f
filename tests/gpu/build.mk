# SPDX-License-Identifier: Apache-2.0
# The CUDA engine and its test programs with nothing but GNU make, a C compiler and
# the CUDA Toolkit: for a bare machine. run.sh calls it:
#   make -f tests/gpu/build.mk -j O=DIR [ARCH=90a] [programs]
O ?= build-gpu
CUDA ?= /usr/local/cuda
CC := /usr/bin/gcc
CXX := /usr/bin/g++
NVCC := $(CUDA)/bin/nvcc
ARCH ?= 90a
GENCODE ?= $(foreach a,$(ARCH),-gencode=arch=compute_$(a),code=sm_$(a))
VERSION := $(shell sed -n 's/^AC_INIT(\[ep-overlap\], \[\(.*\)\])/\1/p' configure.ac)

INCLUDES := -Ilib -Ilib/include -I$(O) -I$(CUDA)/include $(NCCL_CFLAGS)
CFLAGS := -std=gnu11 -O2 -g -Wall -Wextra -Werror -fPIC -fvisibility=hidden -pthread \
  -DEPO_ENGINE_NAME='"cuda"' $(INCLUDES)
NVCCFLAGS = -ccbin $(CXX) -std=c++17 -O3 -lineinfo $(GENCODE) $(INCLUDES) -Xcompiler \
  -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,-Wextra,-Werror
LIBS := -L$(CUDA)/lib64 -lcudart_static -lpthread -ldl -lrt -lm

MEET := meet place rendezvous lead socket hello nodes node_list far far_meet limited memfile shm collective wait turn
C_FILES := lib/core/status.c lib/core/group_card.c lib/core/hmac.c $(MEET:%=lib/backend/host/%.c) $(wildcard lib/backend/*.c lib/backend/cuda/*.c lib/backend/cuda/gemm/*.c lib/moe/*.c)
CU_FILES := $(wildcard lib/backend/cuda/*.cu lib/backend/cuda/gemm/*.cu)
OBJECTS := $(C_FILES:%.c=$(O)/%.o) $(CU_FILES:%.cu=$(O)/%.cu.o)
PROGRAMS := units layer bulk graph bench features products endure
BENCH := bench bench_cpu bench_ffn bench_report
HEADERS := $(wildcard lib/*/*.h lib/backend/*/*.h lib/backend/cuda/*.cuh lib/backend/cuda/gemm/*.h lib/backend/cuda/gemm/*.cuh tests/gpu/*.h tests/fault/*.h)

all: $(PROGRAMS:%=$(O)/%) $(O)/dense $(O)/bench_flex $(O)/fault $(O)/flex_floor $(O)/engine_cuda.so gemm

$(O)/config.h: configure.ac
	@mkdir -p $(@D)
	printf '#define PACKAGE_VERSION "%s"\n#ifndef _GNU_SOURCE\n#define _GNU_SOURCE 1\n#endif\n' "$(VERSION)" > $@
	echo '#include <nccl.h>' | $(CC) $(INCLUDES) -E - > /dev/null 2>&1 && echo '#define HAVE_NCCL 1' >> $@ || true
$(O)/%.o: %.c $(HEADERS) $(O)/config.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c $< -o $@
$(O)/%.cu.o: %.cu $(HEADERS) $(O)/config.h
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -c $< -o $@
$(O)/lib/backend/cuda/gemm/gg_sm90_%.o: GENCODE = -gencode=arch=compute_90a,code=sm_90a
$(O)/engine.a: $(OBJECTS)
	rm -f $@
	ar rcs $@ $(OBJECTS)
$(O)/engine_cuda.so: $(OBJECTS)
	$(CC) -shared -Wl,-z,defs,-z,nodelete -Wl,--exclude-libs,ALL -o $@ $(OBJECTS) $(LIBS)
$(O)/units $(O)/layer $(O)/bulk $(O)/features $(O)/products $(O)/endure: $(O)/%: $(O)/tests/gpu/%.o $(O)/engine.a
	$(CC) -pthread -o $@ $< $(O)/engine.a $(LIBS)
$(O)/graph: $(O)/tests/gpu/graph.o $(O)/tests/gpu/graph_margin.o $(O)/engine.a
	$(CC) -pthread -o $@ $^ $(LIBS)
# Its operations are timed on their way: see bench_cpu.c.
$(O)/bench: $(BENCH:%=$(O)/tests/gpu/%.o) $(O)/engine.a
	$(CC) -pthread -Wl,--wrap=epo_backend_get -o $@ $^ $(LIBS)
# ep-train's dense parts on the GPU and on the CPU.
$(O)/tests/gpu/dense.o: CFLAGS += -Itools/ep-train
$(O)/dense: $(O)/tests/gpu/dense.o $(O)/tools/ep-train/dense.o $(O)/tools/ep-train/dense_gpu.cu.o
	$(CC) -pthread -o $@ $^ $(LIBS)
# Kernels alone: nothing of the engine.
FLEX := flex_fp8 flex_plan flex_rows flex_segments flex_sum kernels
$(O)/bench_flex: $(O)/tests/gpu/bench_flex.o $(O)/tests/gpu/flex_side.o $(O)/tests/gpu/flex_check.o $(FLEX:%=$(O)/lib/backend/cuda/%.cu.o) $(O)/lib/backend/route.o $(O)/lib/backend/route_flex.o
	$(CC) -pthread -o $@ $^ $(LIBS)
$(O)/flex_floor: $(O)/tests/gpu/flex_floor.cu.o
	$(CC) -pthread -o $@ $^ $(LIBS)
# The grouped GEMM alone: tests/gpu/gemm's programs, and the library that its scripts load,
# which sees the C side.
GEMM_CU := $(patsubst %.cu,$(O)/%.cu.o,$(wildcard lib/backend/cuda/gemm/*.cu))
GEMM_C := lib/backend/cuda/gemm/gg_host lib/backend/cuda/gemm/gg_chain lib/core/status
GEMM_TESTS := test_grouped_gemm test_chain
gemm: $(GEMM_TESTS:%=$(O)/%) $(O)/libepo_gemm.so
$(O)/tests/gpu/gemm/test_%.cu.o: $(wildcard tests/gpu/gemm/*.cuh)
$(O)/tests/gpu/gemm/%.o: NVCCFLAGS += -Xcompiler -Wno-missing-field-initializers
$(GEMM_TESTS:%=$(O)/%): $(O)/%: $(O)/tests/gpu/gemm/%.cu.o $(GEMM_CU) $(GEMM_C:%=$(O)/%.o) $(O)/lib/backend/cuda/kernels.cu.o
	$(CC) -pthread -o $@ $^ $(LIBS)
$(O)/seen/%.o: %.c $(HEADERS) $(O)/config.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -fvisibility=default -c $< -o $@
$(O)/libepo_gemm.so: $(O)/tests/gpu/gemm/bench_copy.cu.o $(GEMM_CU) $(GEMM_C:%=$(O)/seen/%.o)
	$(CC) -shared -o $@ $^ $(LIBS)
# One rank is struck, the others have to end well (tests/fault/run.sh).
FAULT := fault judge watch strike job bootstrap apart device_cuda
$(O)/fault: $(FAULT:%=$(O)/tests/fault/%.o) $(O)/engine.a
	$(CC) -pthread -Wl,--wrap=gpu_library_symbol -o $@ $^ $(LIBS)
include tests/gpu/tools.mk
.PHONY: all gemm
.SECONDARY:
