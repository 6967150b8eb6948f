# SPDX-License-Identifier: Apache-2.0
# The interposer and the API library with nothing but GNU make and a C compiler, for a bare
# machine (the CUDA engine: build.mk, then O/ep-overlap/engine_cuda.so):
#   make -f tests/gpu/intercept.mk O=DIR
O ?= build-gpu
CC := /usr/bin/gcc
VERSION := $(shell sed -n 's/^AC_INIT(\[ep-overlap\], \[\(.*\)\])/\1/p' configure.ac)
C_FILES := $(wildcard lib/preload/intercept/*.c lib/preload/record/*.c lib/rules/*.c) lib/preload/ranks.c \
  lib/trace/profile.c lib/trace/intervals.c lib/trace/span_set.c lib/trace/kernel_class.c \
  $(addprefix lib/core/,status.c version.c facts.c fact_value.c text.c options.c env_list.c env_record.c \
  trust.c hostlist.c unserved.c group_card.c scratch.c)
CFLAGS := -std=gnu11 -O2 -g -Wall -Wextra -Werror -fPIC -fvisibility=hidden -pthread -include lib/core/libc.h \
  -Ilib -Ilib/include -I$(O)/intercept
OBJECTS := $(C_FILES:%.c=$(O)/intercept/%.o)
API := $(patsubst %.c,$(O)/intercept/%.o,$(wildcard lib/preload/*.c) $(filter lib/core/%,$(C_FILES)))

all: $(O)/libep_overlap_intercept.so $(O)/libep_overlap.so.0
$(O)/libep_overlap.so.0: $(API) lib/preload/ep_overlap.map
	$(CC) -shared -pthread -Wl,-z,defs,-z,now,-soname,libep_overlap.so.0 -Wl,--version-script=lib/preload/ep_overlap.map \
	  -o $@ $(sort $(API)) -ldl

$(O)/libep_overlap_intercept.so: $(OBJECTS) lib/preload/intercept/intercept.map
	$(CC) -shared -pthread -Wl,-z,defs,-z,now -Wl,--version-script=lib/preload/intercept/intercept.map -o $@ \
	  $(OBJECTS) -ldl -lm
$(O)/intercept/config.h: configure.ac
	@mkdir -p $(@D)
	printf '#define PACKAGE_VERSION "%s"\n#ifndef _GNU_SOURCE\n#define _GNU_SOURCE 1\n#endif\n' "$(VERSION)" > $@
$(O)/intercept/%.o: %.c $(O)/intercept/config.h $(wildcard lib/preload/intercept/*.h lib/preload/record/*.h)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c $< -o $@
# (no rule of `all`: needs nvcc) the kernel for copies inside a GPU, beside the interposer
CUDA ?= /usr/local/cuda
$(O)/intercept_copy.fatbin: lib/preload/intercept/copy.cu
	@mkdir -p $(@D)
	$(CUDA)/bin/nvcc -ccbin /usr/bin/g++ -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -fatbin -o $@ $<
# What the link carries, and what CUPTI costs a launch.
$(O)/link_floor $(O)/record_cost: $(O)/%: tests/gpu/%.cu
	@mkdir -p $(@D)
	$(CUDA)/bin/nvcc -ccbin /usr/bin/g++ -std=c++17 -O2 -Xcompiler -Wall,-Wextra,-Werror -gencode=arch=compute_90a,code=sm_90a \
	  -o $@ $< -ldl
