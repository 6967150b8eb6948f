-- SPDX-License-Identifier: Apache-2.0
-- Who may ask for --ep-overlap, by partition and account, enforced by slurmctld.
--
-- ep_overlap.conf's rules on user, group and node bind everywhere; its rules on
-- partition and account are advisory, because nodes know these names from a variable
-- that users can change.  slurmctld knows them for sure: put this beside slurm.conf as
-- job_submit.lua, or take its functions into the one that you have, and set
--
--     JobSubmitPlugins=lua
--
-- It sees what srun, sbatch and salloc are given when a job is submitted, #SBATCH lines
-- too; not what a srun inside the job is given (cli_filter.lua beside this sees that, but
-- on the user's side).  Where that matters, bind the partition's nodes:
--     { match = { node = "gpu[001-128]"; }; action = "deny"; }

-- The first line that matches decides; a line without partition or account matches
-- all.  deny: the message that users get; without it the job may ask.
local policy = {
    -- { partition = "debug", deny = "no overlap in debug: use partition moe" },
    -- { account = "llm" },
    -- { deny = "in trial: write to hpc-support to join" },
}

-- What the job asks for: "on", "off", "auto" or nil.
local function ep_overlap_asked(job)
    local prefix = "_SLURM_SPANK_OPTION_ep_overlap_"
    local asked, companion
    for _, option in pairs(job.spank_job_env or {}) do
        local name, value = tostring(option):match("^" .. prefix .. "([%w_]+)=(.*)$")
        if name == "ep_overlap" then asked = value end
        if name == "ep_dispatcher" or name == "delay_wgrad" then companion = true end
    end
    -- a user's own default; the environment is there for batch jobs only
    if asked == nil and job.script ~= nil and job.environment ~= nil then
        asked = job.environment["SLURM_EP_OVERLAP"]
    end
    if asked == nil and companion then asked = "on" end
    return asked
end

local function default_partition(parts)
    for name, part in pairs(parts or {}) do
        if part.flag_default == 1 then return name end
    end
    return ""
end

local function ep_overlap_verdict(partition, account)
    for _, line in ipairs(policy) do
        if (line.partition == nil or line.partition == partition)
            and (line.account == nil or line.account == account) then
            return line.deny
        end
    end
    return nil
end

-- nil, or why the job is refused.
function ep_overlap_check(job, parts)
    local asked = ep_overlap_asked(job)
    if asked == nil or asked == "off" then return nil end
    local account = job.account or job.default_account or ""
    -- "a,b": the job may start in either
    for partition in string.gmatch(job.partition or default_partition(parts), "[^,]+") do
        local why = ep_overlap_verdict(partition, account)
        if why ~= nil then
            return string.format("ep-overlap: --ep-overlap=%s is denied in partition %s: %s",
                                 asked, partition, why)
        end
    end
    return nil
end

function slurm_job_submit(job, parts, uid)
    local why = ep_overlap_check(job, parts)
    if why ~= nil then
        slurm.log_info("%s (uid %u)", why, uid)
        slurm.log_user(why)
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, parts, uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
