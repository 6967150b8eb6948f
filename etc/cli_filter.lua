-- SPDX-License-Identifier: Apache-2.0
-- Tells users early, in srun, sbatch and salloc, that --ep-overlap is not for a
-- partition or an account; for a srun inside a job as well.  Put it beside slurm.conf as
-- cli_filter.lua on login and compute nodes, or take its function into the one that you
-- have, and set
--
--     CliFilterPlugins=lua
--
-- It runs as the user and can be got around: what has to hold belongs into
-- job_submit.lua or into rules on user, group and node of ep_overlap.conf.

-- As in job_submit.lua.
local policy = {
    -- { partition = "debug", deny = "no overlap in debug: use partition moe" },
}

local function ep_overlap_asked(options)
    local given = options["spank"] and options["spank"]["ep_overlap"]
    if given == nil then return nil end
    local asked = given["ep-overlap"]
    if asked == nil and (given["ep-dispatcher"] ~= nil or given["delay-wgrad"] == "set") then
        asked = "on"
    end
    return asked
end

-- nil, or why the submission is refused.
function ep_overlap_filter(options)
    local asked = ep_overlap_asked(options)
    if asked == nil or asked == "off" then return nil end
    local partitions = options["partition"] or os.getenv("SLURM_JOB_PARTITION") or ""
    local account = options["account"] or os.getenv("SLURM_JOB_ACCOUNT") or ""
    for partition in string.gmatch(partitions, "[^,]+") do
        for _, line in ipairs(policy) do
            if (line.partition == nil or line.partition == partition)
                and (line.account == nil or line.account == account) then
                if line.deny ~= nil then
                    return string.format("ep-overlap: --ep-overlap=%s is denied in partition %s: %s",
                                         asked, partition, line.deny)
                end
                break
            end
        end
    end
    return nil
end

function slurm_cli_setup_defaults(options, early)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
    local why = ep_overlap_filter(options)
    if why ~= nil then
        slurm.log_error("%s", why)
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
    return slurm.SUCCESS
end

return slurm.SUCCESS
