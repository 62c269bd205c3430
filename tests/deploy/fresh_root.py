"""The native image's steps where there is no Docker, in a fresh Debian; then a pod's life in it.

    python -m tests.deploy.fresh_root /tmp/earshot-root [FOLDER …]

needs root, Linux's namespaces, debootstrap and 8 GB, and takes some minutes. Folders that pip takes
packages from on this machine can be named, to be there in the root, too. The Dockerfile's
instructions are carried out in that folder by chroot. What is made so is then run as
deploy/kubernetes/base/deployment.yaml says: its user without capabilities, root read-only, only its
volumes writable, the init container first; its probes are asked, a clip is transcribed with a key,
and SIGTERM must refuse what is new, answer what is under way, and end it with status 0. It has its
own network, so that no other program has its ports.

What differs from the image: the base is Debian 12 in place of NVIDIA's Ubuntu 24.04, which no
package registry has, and so Python is 3.11 in place of 3.12; no cgroup bounds memory; no seccomp.
"""

import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import yaml

from tests.deploy.dockerfiles import IMAGES, ROOT, copied, environment, instructions

DOCKERFILE = IMAGES / "native.Dockerfile"
BASE = ROOT / "deploy" / "kubernetes" / "base"
CLIP, LONG_CLIP = "tests/data/en_question.wav", "tests/data/en_long.mp3"
LEAD_S = 0.5  # of the long one before SIGTERM; it takes seconds
READY_S = 300
SERVE = (sys.executable, "-m", "serve")
CLIENT = httpx2.Client(base_url="http://127.0.0.1:8000", timeout=120, trust_env=False)


def build(root, shared):
    """Carry out the Dockerfile's instructions in the folder."""
    if not (root / "usr").exists():
        run("debootstrap", "--variant=minbase", "bookworm", str(root))
    # How this machine reaches package registries.
    certificates = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    shutil.copy(os.environ.get("PIP_CERT", certificates), root / "machine.crt")
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    binds = "".join(f"mkdir -p {root}{one}; mount --bind {one} {root}{one}; " for one in shared)
    variables = dict.fromkeys(("PIP_CERT", "REQUESTS_CA_BUNDLE"), "/machine.crt")
    done = root / "steps-that-ran"  # so that a second call goes on
    done.touch()
    folder, copies = "/", iter(copied(DOCKERFILE))
    for number, (name, argument) in enumerate(instructions(DOCKERFILE), 1):
        print(f"step {number}: {name} {argument[:100]}", flush=True)
        if name == "WORKDIR":
            folder = argument
            (root / folder[1:]).mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            variables |= dict(pair.split("=", 1) for pair in shlex.split(argument))
        elif name == "COPY":
            copy(*next(copies), root, folder)
        elif name == "RUN" and argument not in done.read_text(encoding="utf-8").splitlines():
            sets = "".join(f"export {key}={value}; " for key, value in variables.items())
            inside = f"mount -t proc proc /proc; cd {folder}; {sets}{argument}"
            run(
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"),
                f"{binds}exec chroot {root} sh -c {shlex.quote(inside)}",
            )
            with done.open("a", encoding="utf-8") as file:
                print(argument, file=file)


def copy(sources, target, root, folder):
    """COPY, from the project's root."""
    goal = root / os.path.join(folder, target)[1:]
    for source in sources:
        found = ROOT / source
        if found.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(found, goal, dirs_exist_ok=True, ignore=ignored)
        else:
            shutil.copy(found, goal)


def run(*command):
    """Run it; a failure ends everything."""
    subprocess.run(command, check=True, timeout=3600)


def live(root):
    """A pod's life, in the namespaces that `main` makes."""
    pod = yaml.safe_load((BASE / "deployment.yaml").read_text(encoding="utf-8"))
    pod = pod["spec"]["template"]["spec"]
    (init,), (server,) = pod["initContainers"], pod["containers"]
    run("ip", "link", "set", "lo", "up")
    volumes = prepare(root, pod)
    confine(root, volumes, init)
    began = time.monotonic()
    subprocess.run(command(root, pod, init), check=True, timeout=READY_S)
    print(f"init container: {time.monotonic() - began:.1f} s", flush=True)
    release(root)
    confine(root, volumes, server)
    began = time.monotonic()
    process = subprocess.Popen(command(root, pod, server), start_new_session=True)
    while ask(server["startupProbe"]) != 200:
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() - began < READY_S, "never ready"
        time.sleep(0.5)
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    assert ask(server["readinessProbe"]) == ask(server["livenessProbe"]) == 200
    key = (root.parent / f"{root.name}.key").read_text(encoding="utf-8").strip()
    assert transcript(CLIP, "wrong")["error"]["code"], "a wrong key was taken"
    print("transcript:", transcript(CLIP, key)["text"], flush=True)
    stop(process, key, server)


def stop(process, key, server):
    """SIGTERM while a request is under way, which must be answered."""
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(transcript, LONG_CLIP, key)
        time.sleep(LEAD_S)
        assert not under_way.done()
        process.send_signal(signal.SIGTERM)  # tini passes it on
        while ask(server["readinessProbe"]) == 200:
            time.sleep(0.05)
        assert not under_way.done()
        assert "error" in transcript(CLIP, key), "taken in while it drains"
        print("answered while it drained:", under_way.result()["text"][:60], flush=True)
    assert process.wait(60) == 0, process.returncode
    print("SIGTERM: status 0")


def prepare(root, pod):
    """What the pod's volumes are on this machine, by name."""
    outside = root.parent / f"{root.name}.volumes"
    shutil.rmtree(outside, ignore_errors=True)
    volumes = {}
    for volume in pod["volumes"]:
        path = volumes[volume["name"]] = outside / volume["name"]
        path.mkdir(parents=True)
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
            run("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(path))
        elif "configMap" in volume:
            shutil.copy(BASE / "settings.toml", path)
        elif "secret" in volume:
            made = subprocess.run(
                (*SERVE, "keys", "new", "--name", "alice", "--file", str(path / "keys.toml")),
                check=True,
                capture_output=True,
                text=True,
                cwd=ROOT,
            )
            (root.parent / f"{root.name}.key").write_text(made.stdout, encoding="utf-8")
        run("chgrp", "-R", str(pod["securityContext"]["fsGroup"]), str(path))
        run("chmod", "-R", "g+rwX", str(path))
    return volumes


def confine(root, volumes, container):
    """Make the root read-only, with the container's volumes in it."""
    run("mount", "--rbind", str(root), str(root))
    run("mount", "-t", "proc", "proc", str(root / "proc"))
    for mount in container["volumeMounts"]:
        source, target = volumes[mount["name"]], root / mount["mountPath"][1:]
        if "subPath" in mount:
            source = source / mount["subPath"]
            source.mkdir(exist_ok=True)  # as kubelet makes it: with its volume's mode and group
            shutil.copystat(volumes[mount["name"]], source)
            os.chown(source, -1, volumes[mount["name"]].stat().st_gid)
        target.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(source), str(target))
        if mount.get("readOnly"):
            run("mount", "-o", "remount,bind,ro", str(target))
    run("mount", "-o", "remount,bind,ro", str(root))


def release(root):
    """Take all of `confine` away."""
    run("umount", "--recursive", str(root))


def command(root, pod, container):
    """What runs a container's command in the root, with its user and its environment."""
    context = pod["securityContext"]
    variables = environment(DOCKERFILE)
    path = variables["PATH"].replace("$PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    variables |= {"PATH": path} | {one["name"]: one["value"] for one in container["env"]}
    return [
        *("setpriv", "--no-new-privs", "chroot", f"--groups={context['fsGroup']}"),
        *(f"--userspec={context['runAsUser']}:{context['runAsGroup']}", str(root)),
        *("env", "--ignore-environment", *(f"{key}={value}" for key, value in variables.items())),
        *("sh", "-c", 'cd /earshot && exec tini -s -- "$@"', "sh", *container["args"]),
    ]


def ask(probe):
    """The status with which a probe is answered; 0: nothing listens."""
    asked = probe["httpGet"]
    assert asked["port"] == "http"
    (header,) = asked["httpHeaders"]
    headers = {header["name"]: header["value"]}
    try:
        return CLIENT.get(asked["path"], headers=headers).status_code
    except httpx2.TransportError:
        return 0


def transcript(clip, key):
    """What the server says of a clip, or why it does not."""
    found = CLIENT.post(
        "/v1/audio/transcriptions",
        headers={"Authorization": f"Bearer {key}"},
        files={"file": (ROOT / clip).read_bytes()},
        data={"language": "en"},
    )
    return found.json()


def main():
    """Build, then live in new namespaces."""
    if sys.argv[1] == "--live":
        live(Path(sys.argv[2]))
        return
    root = Path(sys.argv[1]).absolute()
    build(root, sys.argv[2:])
    run(
        *("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"),
        *(sys.executable, "-m", "tests.deploy.fresh_root", "--live", str(root)),
    )


if __name__ == "__main__":
    main()
