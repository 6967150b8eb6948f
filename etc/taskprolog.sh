#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A TaskProlog runs after the plugin, and what it prints as "export LD_PRELOAD=..."
# replaces the task's value, the preloaded library with it.  One that has a library of
# its own to preload adds to what is there:
echo "export LD_PRELOAD=/opt/site/libtrace.so${LD_PRELOAD:+:$LD_PRELOAD}"
