// Command fetch builds the programs of a Kubernetes into the user's cache folder, unless present, and installs Debian's
// programs for the nodes, which needs root. `make kube` runs the command before the tests.
//
//	go run ./integration/judges/kube/fetch
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// packages maps a program or file to the Debian package.
var packages = map[string]string{
	"containerd":       "containerd",
	"runc":             "runc",
	"/usr/lib/cni/ptp": "containernetworking-plugins",
	"nft":              "nftables",
	"iptables":         "iptables",
	"conntrack":        "conntrack",
	"ipset":            "ipset",
	"openssl":          "openssl",
	"nsenter":          "util-linux",
	"ip":               "iproute2",
}

func main() {
	if err := fetch(os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "fetch:", err)
		os.Exit(1)
	}
}

func fetch(progress io.Writer) error {
	// The build takes minutes, so check the machine for a cluster first.
	if os.Geteuid() != 0 {
		return errors.New("the cluster needs root: run make kube as root, or make judges KUBE=skip")
	}
	if _, err := os.Stat("/sys/fs/cgroup/memory"); err != nil {
		return fmt.Errorf("the cluster needs cgroups of version 1; make judges KUBE=skip leaves it out: %w", err)
	}
	var missing []string
	for program, pkg := range packages {
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, pkg)
		}
	}
	if len(missing) > 0 {
		install := append([]string{"install", "-y", "--no-install-recommends"}, missing...)
		for _, args := range [][]string{{"update"}, install} {
			c := exec.Command("apt-get", args...)
			c.Stdout, c.Stderr = progress, progress
			if err := c.Run(); err != nil {
				return fmt.Errorf("apt-get %s (install %q yourself if this is not Debian, or you are not root): %w",
					args[0], missing, err)
			}
		}
	}
	begun := time.Now()
	fmt.Fprintln(progress, "Kubernetes (15 minutes at first, on two processors) …")
	if err := pyenv.FetchKubernetes(progress); err != nil {
		return err
	}
	fmt.Fprintf(progress, "Kubernetes: ready after %v\n", time.Since(begun).Round(100*time.Millisecond))
	return nil
}
