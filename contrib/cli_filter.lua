-- SPDX-License-Identifier: Apache-2.0
--
-- Refuse jobs at submission that the site's policy (vhpc.toml, [[policy]]) will refuse at their start.
--
-- This is for the comfort of users: a job does not wait in the queue for a refusal. It protects
-- nothing, since users can go past it; vhpcd decides when a job starts. A job is refused here only
-- if every rule that may apply to it refuses it, or if its image does not exist.
--
-- slurm.conf of login hosts and nodes:  CliFilterPlugins=cli_filter/lua
-- Copy this file to the folder of slurm.conf, or call vhpc_check() from the site's own cli_filter.lua.

local VHPC = "/usr/bin/vhpc"
local REFUSED = 1 -- exit status of vhpc for a mistake of the user; others mean that it cannot tell

local function quoted(text)
    return "'" .. string.gsub(text, "'", "'\\''") .. "'"
end

-- Exit status of a command; os.execute() of Lua 5.1 returns that of wait(2), later ones three values.
local function status_of(command)
    local first, _, code = os.execute(command)
    if type(first) == "number" then
        return first >= 256 and math.floor(first / 256) or first
    end
    return code
end

local function wish(options, option, variable)
    local given = options["spank"]
    given = given and given["vhpc"]
    given = given and given[option]
    if given == nil then
        given = os.getenv(variable)
    end
    if given == "" then
        given = nil
    end
    return given
end

-- A value that Slurm will choose from a list is not known yet.
local function known(text)
    if text ~= nil and string.find(text, ",", 1, true) then
        return nil
    end
    return text
end

function vhpc_check(options)
    local image = wish(options, "vhpc-image", "VHPC_IMAGE")
    if image == nil or (options["type"] == "srun" and os.getenv("SLURM_JOB_ID") ~= nil) then
        return slurm.SUCCESS -- no guests, or a step of a job that runs
    end
    local arguments = {
        ["--image"] = image,
        ["--network"] = wish(options, "vhpc-network", "VHPC_NETWORK"),
        ["--disk"] = wish(options, "vhpc-disk", "VHPC_DISK"),
        ["--batch"] = wish(options, "vhpc-batch", "VHPC_BATCH"),
        ["--guests-per-node"] = wish(options, "vhpc-guests-per-node", "VHPC_GUESTS_PER_NODE"),
        ["--vfs"] = wish(options, "vhpc-vfs", "VHPC_VFS"),
        ["--timeout"] = wish(options, "vhpc-timeout", "VHPC_TIMEOUT"),
        ["--partition"] = known(options["partition"]),
        ["--account"] = options["account"],
        ["--qos"] = known(options["qos"]),
    }
    local command = quoted(VHPC) .. " policy check"
    for name, value in pairs(arguments) do
        command = command .. " " .. quoted(name .. "=" .. value)
    end
    if status_of(command .. " </dev/null") == REFUSED then
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, pack_offset)
    return vhpc_check(options)
end

function slurm_cli_post_submit(offset, job_id, step_id)
    return slurm.SUCCESS
end
