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

-- A value that Slurm will choose from a list is not known yet.
local function known(text)
    if text ~= nil and string.find(text, ",", 1, true) then
        return nil
    end
    return text
end

function vhpc_check(options)
    local given = (options["spank"] or {})["vhpc"] or {}
    local image = given["vhpc-image"] or os.getenv("VHPC_IMAGE") or ""
    if image == "" or (options["type"] == "srun" and os.getenv("SLURM_JOB_ID") ~= nil) then
        return slurm.SUCCESS -- no guests, or a step of a job that runs
    end
    local arguments = {
        ["--partition"] = known(options["partition"]),
        ["--account"] = options["account"],
        ["--qos"] = known(options["qos"]),
    }
    for name, value in pairs(given) do -- vhpc itself reads the variables of the others
        arguments[string.gsub(name, "^vhpc", "-")] = value
    end
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
