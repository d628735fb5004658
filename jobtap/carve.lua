-- SPDX-License-Identifier: LGPL-3.0-or-later
-- Says who may carve how much of an allocation for user-space Kubernetes.
--
-- Step: 2 (carve). In: attributes.user.dovetail = {nodes=N, cores="all"|K} of a job that is
-- submitted, the table `dovetail-policy` of the site's configuration. Out: the job is rejected
-- with the reason, or annotated with the slices that it gets; if these are fewer, its jobspec is
-- changed. Invariants: a job that asks for no slices is never touched; nobody gets more than they
-- asked for; without a policy everything that makes sense is allowed.
local keys = { users = "list of user ids", queues = "list of names", ["max-nodes"] = "number, whole and from 1 on",
    ["max-cores"] = "number, whole and from 1 on", ["max-share"] = "number above 0 and up to 1", reduce = "boolean",
    contact = "text" }
local policy = {}

local function whole(value) return math.type(value) == "integer" and value >= 1 end

local function list(value, kind)
    for i = 1, type(value) == "userdata" and #value or 0 do
        if math.type(value[i]) ~= kind and type(value[i]) ~= kind then return false end
    end
    return type(value) == "userdata" and tostring(value):sub(1, 1) == "["
end

local fits = {
    [keys.users] = function(value) return list(value, "integer") end,
    [keys.queues] = function(value) return list(value, "string") end,
    [keys["max-nodes"]] = whole,
    [keys["max-share"]] = function(value) return type(value) == "number" and value > 0 and value <= 1 end,
    [keys.reduce] = function(value) return type(value) == "boolean" end,
    [keys.contact] = function(value) return type(value) == "string" end,
}

jobtap.on("conf.update", function(conf)
    local found = conf["dovetail-policy"] or {}
    if tostring(conf["dovetail-policy"] or "{"):sub(1, 1) ~= "{" then error("dovetail-policy is not a table", 0) end
    for key, value in pairs(found) do
        local why = not keys[key] and " is not known" or not fits[keys[key]](value) and " is not a " .. keys[key]
        if why then error("dovetail-policy." .. key .. why, 0) end
    end
    policy = found
end)

local function allowed(items, value)
    for _, item in ipairs(items or {}) do
        if item == value then return true end
    end
    return not items
end

-- The nodes that the job itself asks for; nil where it asks for cores on any number of them.
local function nodes_of(resources)
    for _, resource in ipairs(resources) do
        local count, inner = resource.count, resource.type == "node" and 1 or nodes_of(resource.with or {})
        count = type(count) == "number" and count or count.max or count.min
        if count and inner then return count * inner end
    end
end

-- The share of so many nodes, in whole ones: 29 of 100 are 0.29, though 100 * 0.29 is a little less.
local function share_of(has)
    return math.floor(has * (policy["max-share"] or math.huge) + 1e-9)
end

-- The slices that a job gets: what it asks for, or with `reduce` what policy leaves of it.
local function share(job, asked)
    local nodes, cores, most = asked.nodes, asked.cores or "all", policy["max-cores"]
    if policy.reduce and whole(nodes) and (cores == "all" or whole(cores)) then
        local has = nodes_of(job.jobspec.resources) or math.huge
        nodes = math.max(1, math.min(nodes, policy["max-nodes"] or nodes, share_of(has)))
        cores = most and (cores == "all" or cores > most) and most or cores
    end
    return nodes, cores
end

local function objection(job, asked)
    local nodes, cores = share(job, asked)
    local system, has = job.jobspec.attributes.system, nodes_of(job.jobspec.resources)
    if not whole(nodes) then
        return "nodes is a whole number from 1 on"
    elseif cores ~= "all" and not whole(cores) then
        return "cores is a whole number from 1 on, or all"
    elseif has and cores == "all" and nodes > has then
        return string.format("nodes=%d does not fit into the job's %d nodes", nodes, has)
    elseif not allowed(policy.users, job.userid) then
        return string.format("user %d may not use it here", job.userid)
    elseif not allowed(policy.queues, system.queue) then
        return string.format("it is not allowed in queue %s", system.queue or "(none)")
    elseif nodes > (policy["max-nodes"] or nodes) then
        return string.format("nodes=%d is more than the %d allowed here", nodes, policy["max-nodes"])
    elseif policy["max-cores"] and (cores == "all" or cores > policy["max-cores"]) then
        return string.format("cores=%s is more than the %d allowed on a node", cores, policy["max-cores"])
    elseif not has and (policy["max-share"] or 1) < 1 then
        return string.format("%g %% of the job's nodes are allowed; ask for them with -N", policy["max-share"] * 100)
    elseif has and nodes > share_of(has) then
        return string.format("nodes=%d is more than %g %% of the job's %d nodes", nodes, policy["max-share"] * 100, has)
    end
end

local function request(job)
    local user = job.jobspec.attributes.user
    local asked = user and user.dovetail
    return asked and (type(asked) ~= "userdata" or not asked.slice) and asked -- slices were judged already
end

jobtap.on("job.validate", function(job)
    local asked = request(job)
    local why = asked and (type(asked) ~= "userdata" and "nodes=N is missing" or objection(job, asked))
    if why then job:reject("dovetail: " .. why .. (policy.contact and "; " .. policy.contact or "")) end
end)

jobtap.on("job.new", function(job)
    local asked = request(job)
    if asked and (job.state == "NEW" or not job:posted("memo")) then -- another plugin may annotate first
        local nodes, cores = share(job, asked)
        local gets = { nodes = nodes, cores = cores }
        local cut = nodes ~= asked.nodes or cores ~= (asked.cores or "all")
        if cut then assert(job:update({ ["attributes.user.dovetail"] = gets })) end
        job:annotate({ dovetail = gets })
    end
end)
