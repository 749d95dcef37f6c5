#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the batch script at its end: the relay ends, and the secret goes.

[[ -n ${forward_pid:-} ]] && kill "$forward_pid" 2>/dev/null
rm -f secret ready vnc.passwd
