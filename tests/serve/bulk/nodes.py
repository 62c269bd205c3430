"""A Ray cluster: a head that works nothing and nodes with a core each, all separate processes.

In a separate process, too, for Ray starts nodes by fork, and in one where gRPC has threads, as in
that of the tests, a node that is started so may never answer. Prints the address; kills a node for
each line that it reads; and ends all with its input.
"""

import sys

from ray.cluster_utils import Cluster


def main(nodes):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        print(f"address {cluster.address}", flush=True)
        for _ in sys.stdin:
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            print("killed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
