# SPDX-License-Identifier: Apache-2.0
# The commands and the plugin beside the engine, for build.mk, which includes this.

# The commands over the engine: libep_overlap.so finds engine_cuda.so beside itself.
CORE := $(wildcard lib/core/*.c)
CORE := $(filter-out lib/core/config%.c lib/core/policy.c lib/core/auto.c lib/core/probe_r%.c,$(CORE))
API_FILES := $(wildcard lib/preload/*.c) $(CORE)
MEASURE_FILES := $(wildcard lib/measure/*.c) lib/trace/intervals.c $(CORE)
TOOL_FILES := $(addprefix tools/ep-overlap/,main.c json.c $(notdir $(wildcard tools/ep-overlap/bench*.c))) $(MEASURE_FILES)
TRAIN_FILES := $(wildcard tools/ep-train/*.c) $(MEASURE_FILES)
tools: $(O)/engine_cuda.so $(O)/libep_overlap.so $(O)/ep-overlap $(O)/ep-train
$(O)/lib/preload/%.o: CFLAGS += -DEPO_PKGLIBDIR='"/usr/local/lib/ep-overlap"'
$(O)/tools/%.o: CFLAGS += -DHAVE_CONFIG_H
$(O)/tools/ep-train/%.o: CFLAGS += -O3 -DEP_TRAIN_CUDA
$(O)/libep_overlap.so: $(API_FILES:%.c=$(O)/%.o)
	$(CC) -shared -Wl,-z,defs -Wl,--version-script=lib/preload/ep_overlap.map -Wl,-soname,libep_overlap.so.0 -o $@ $^ -lpthread -ldl
	ln -sf libep_overlap.so $@.0
$(O)/ep-overlap: $(TOOL_FILES:%.c=$(O)/%.o) $(O)/libep_overlap.so
	$(CC) -pthread -o $@ $^ -Wl,-rpath,'$$ORIGIN' -ldl -lm
$(O)/ep-train: $(TRAIN_FILES:%.c=$(O)/%.o) $(O)/tools/ep-train/dense_gpu.cu.o $(O)/libep_overlap.so
	$(CC) -pthread -o $@ $^ -Wl,-rpath,'$$ORIGIN' $(LIBS)

# A staged install for tests/cluster/run.sh: plugin, probe and the commands with check.
# Needs the headers and libraries of Slurm and libconfig: . env.sh of unpack-slurm.sh.
STAGE := $(O)/stage
SCANCEL ?= $(shell command -v scancel)
CONFIG_FILES := lib/core/config.c lib/core/config_read.c lib/core/policy.c lib/core/auto.c
RUN_FILES := lib/core/probe_record.c lib/core/probe_run.c
PLUGIN_FILES := $(wildcard spank/*.c lib/rules/*.c) $(CORE) $(CONFIG_FILES) $(RUN_FILES)
PROBE_FILES := tools/probe/main.c $(wildcard lib/probe/*.c) $(CORE) $(RUN_FILES)
CHECK_FILES := $(TOOL_FILES) $(wildcard tools/ep-overlap/check*.c tools/ep-overlap/report*.c lib/trace/log*.c lib/rules/*.c lib/probe/*.c) lib/trace/lines.c lib/trace/config_dump.c $(CONFIG_FILES) $(RUN_FILES)
$(O)/spank/%.o: CFLAGS += -Ispank -DEP_SCANCEL='"$(SCANCEL)"' -DEP_LIBRARY='"/usr/local/lib/libep_overlap.so.0"' \
  -DEP_PROBE='"/usr/local/libexec/ep-overlap/probe"' -DEP_CONFIG='"/usr/local/etc/ep_overlap.conf"'
$(O)/tools/ep-overlap/%.o: CFLAGS += -DEP_CONFIG='"/usr/local/etc/ep_overlap.conf"' \
  -DEP_PROBE='"/usr/local/libexec/ep-overlap/probe"' -DEP_ENGINES='"/usr/local/lib/ep-overlap"' -DEP_PLUGIN='"/usr/local/lib/slurm/ep_overlap.so"'
$(STAGE)/lib/slurm/ep_overlap.so: $(PLUGIN_FILES:%.c=$(O)/%.o)
	@mkdir -p $(@D)
	$(CC) -shared -Wl,--version-script=spank/plugin.map -o $@ $^ -lconfig -lm -lpthread
$(STAGE)/libexec/probe: $(PROBE_FILES:%.c=$(O)/%.o)
	@mkdir -p $(@D)
	$(CC) -o $@ $^ -ldl
$(STAGE)/bin/ep-overlap: $(CHECK_FILES:%.c=$(O)/%.o) $(O)/libep_overlap.so
	@mkdir -p $(@D)
	$(CC) -pthread -o $@ $^ -Wl,-rpath,'$$ORIGIN/../lib' -lconfig -ldl -lm
stage: tools $(STAGE)/lib/slurm/ep_overlap.so $(STAGE)/libexec/probe $(STAGE)/bin/ep-overlap
	mkdir -p $(STAGE)/lib/ep-overlap
	cp $(O)/ep-train $(STAGE)/bin/
	cp $(O)/libep_overlap.so $(STAGE)/lib/
	ln -sf libep_overlap.so $(STAGE)/lib/libep_overlap.so.0
	cp $(O)/engine_cuda.so $(STAGE)/lib/ep-overlap/
	$(MAKE) -f tests/gpu/intercept.mk O=$(O) CUDA=$(CUDA) $(O)/libep_overlap_intercept.so $(O)/intercept_copy.fatbin
	cp $(O)/libep_overlap_intercept.so $(O)/intercept_copy.fatbin $(STAGE)/lib/ep-overlap/
	printf "stage_bindir=/bin\nstage_libdir=/lib\nstage_plugindir=/lib/slurm\nstage_pkglibexecdir=/libexec\n" > $(STAGE)/stage.env
.PHONY: tools stage
