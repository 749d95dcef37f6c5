# SPDX-License-Identifier: Apache-2.0
# Renders files of contrib/ondemand as Open OnDemand's dashboard does: trim mode "-", the values of the
# form as methods (submit.yml.erb), as methods of "context" (template/), or as local variables (view.html.erb).
# Arguments: form|submit|template|view|plain FILE; values as JSON on standard input. Prints the result, as
# JSON if it is YAML; plain: the file is YAML and not rendered.
require "erb"
require "json"
require "ostruct"
require "yaml"

way, path = ARGV
values = JSON.parse($stdin.read)
erb = ERB.new(File.read(path), trim_mode: "-")
erb.filename = path
scope =
  case way
  when "form", "plain" then nil
  when "submit" then OpenStruct.new(values).instance_eval { binding }
  when "template" then Struct.new(:session, :context).new(nil, OpenStruct.new(values)).instance_eval { binding }
  when "view" then Object.new.instance_eval { binding }.tap { |b| values.each { |k, v| b.local_variable_set(k, v) } }
  end
text = way == "plain" ? File.read(path) : erb.result(scope)
puts %w[form submit plain].include?(way) ? JSON.generate(YAML.safe_load(text)) : text
