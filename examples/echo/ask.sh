#!/usr/bin/env bash
# The documented paths of Echo with curl. Needs ECHO_URL and ECHO_TOKEN.
set -euo pipefail

ask() { curl -fsS -H "Authorization: Bearer $ECHO_TOKEN" -H 'Content-Type: application/json' "$@"; echo; }

curl -fsS "$ECHO_URL/api/versions"; echo
ask "$ECHO_URL/api/v2/whoami"
ask -d '{"args":{"time_window":"1h"}}' "$ECHO_URL/api/v2/tools/fleet.cluster.find_stragglers"
ask -d '{"sql":"SELECT metric_name, count(*) AS n FROM events GROUP BY ALL ORDER BY n DESC LIMIT 5"}' "$ECHO_URL/api/v2/sql"
ask -H 'Accept: application/x-ndjson' -d '{"args":{"limit":10}}' "$ECHO_URL/api/v2/tools/fleet.cluster.anomaly_list"
