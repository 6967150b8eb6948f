#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What the plugin decided on this node, for node_exporter's textfile collector:
#
#   prometheus.sh LOG OUTPUT
#   prometheus.sh /var/log/slurm/slurmd.log /var/lib/node_exporter/textfile/ep_overlap.prom
#
# Run it every minute from a systemd timer or cron, as a user who may read slurmd's log.
# It counts the log's lines, so rotating the log starts the counters again, as Prometheus
# expects of counters.  OUTPUT appears whole or not at all, mode 0644.
set -eu
[ $# = 2 ] || { echo "usage: $0 LOG OUTPUT" >&2 && exit 2; }
log=$1 output=$2
case $output in
*.prom) ;;
*) echo "$0: OUTPUT ends in .prom, not '$output'" >&2 && exit 2 ;;
esac
[ -r "$log" ] || { echo "$0: cannot read $log" >&2 && exit 1; }

umask 022
new=$(mktemp "$output.XXXXXX") # in the same folder, not ending in .prom: never read half-written
trap 'rm -f "$new"' EXIT
awk '
    BEGIN { split("on off refused", words, " ") }
    # the first in a line: what follows it may be the words of a user
    !match($0, /ep-overlap: step [0-9]+\.[0-9]+: /) { next }
    { $0 = substr($0, RSTART + length("ep-overlap: step ")); step = $1; sub(/^[0-9.]+: /, "") }
    /^refused: / { steps["refused"]++; next }
    /^on, / {
        steps["on"]++
        dispatcher = $3
        sub(/,$/, "", dispatcher)
        if (dispatcher !~ /^[a-z:]+$/) dispatcher = "other"
        on[of[step] = dispatcher]++
        next
    }
    # what a task came to, at the end of a step whose first line said on
    /^was (refused|off)/ {
        steps[/^was refused/ ? "refused" : "off"]++
        if (/^was off instead/) failed++
        if (step in of) { steps["on"]--; on[of[step]]--; delete of[step] }
        next
    }
    /^off instead/ { failed++ }
    /^off: / { broken++ }
    /^off/ { steps["off"]++ }
    END {
        print "# HELP ep_overlap_steps_total Steps of srun on this node by what was decided, since the log began."
        print "# TYPE ep_overlap_steps_total counter"
        for (i = 1; i in words; i++)
            printf "ep_overlap_steps_total{decision=\"%s\"} %d\n", words[i], steps[words[i]]
        print "# HELP ep_overlap_steps_on_total Steps with overlap on, by dispatcher."
        print "# TYPE ep_overlap_steps_on_total counter"
        for (name in on)
            printf "ep_overlap_steps_on_total{dispatcher=\"%s\"} %d\n", name, on[name]
        print "# HELP ep_overlap_broken_configuration_total Steps that found a broken ep_overlap.conf."
        print "# TYPE ep_overlap_broken_configuration_total counter"
        printf "ep_overlap_broken_configuration_total %d\n", broken
        print "# HELP ep_overlap_requests_not_served_total Steps that asked for overlap and ran as off (on_failed_request)."
        print "# TYPE ep_overlap_requests_not_served_total counter"
        printf "ep_overlap_requests_not_served_total %d\n", failed
    }' "$log" >"$new"
chmod 644 "$new" # mktemp makes it 0600
mv -f "$new" "$output"
trap - EXIT
