"""Who is slow, whom it blocks, what it costs. Needs ECHO_URL and ECHO_TOKEN."""

import os
import sys

import httpx


def main() -> int:
    headers = {"Authorization": f"Bearer {os.environ['ECHO_TOKEN']}"}  # noqa: TID251 - an example
    with httpx.Client(base_url=os.environ["ECHO_URL"], headers=headers) as echo:  # noqa: TID251

        def ask(tool: str, **args: object) -> dict[str, list[dict[str, object]]]:
            answer = echo.post(f"/api/v2/tools/fleet.cluster.{tool}", json={"args": args})
            answer.raise_for_status()
            return answer.json()["result"]

        found = ask("find_stragglers", time_window="1h")
        if not found["rows"]:
            seen = found["coverage"]["n_nodes"]
            print(
                "no straggler" if seen else "unknown: nothing was reported", f"({seen} nodes seen)"
            )
            return 0
        for row in found["rows"]:
            print(
                f"{row['cluster_id']} {row['node_id']}: {row['verdict'] or row['severity']}, score {row['score']}"
            )
        for row in ask("blame_chain", time_window="1h")["rows"]:
            print(
                f"  {row['culprit_node']} made {row['victim']} wait {row['waited_gpu_s']} GPU-seconds"
            )
        for row in ask("cost_by_culprit", time_window="1h")["rows"]:
            print(
                f"  {row['node_id']} cost {row['gpu_seconds']} GPU-seconds, {row['amount']} {row['currency']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
