//go:build judges

package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// units writes the units of deploy/systemd into a folder, with the shim's unit for a worker. An existing program
// replaces the programs of kvatlas, because systemd-analyze requires the file.
func units(t *testing.T) (dir string, names []string) {
	t.Helper()
	program, err := exec.LookPath("true")
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	for file, name := range map[string]string{"kvatlas-indexer.service": "kvatlas-indexer.service",
		"kvatlas-worker-shim@.service": "kvatlas-worker-shim@w1.service"} {
		text, err := os.ReadFile(filepath.Join(root, "deploy/systemd", file))
		if err != nil {
			t.Fatal(err)
		}
		unit := regexp.MustCompile(`(?m)^ExecStart=\S+`).ReplaceAllString(string(text), "ExecStart="+program)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(unit), 0o644); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	return dir, names
}

// analyze runs systemd-analyze and returns the output.
func analyze(dir string, args ...string) (string, error) {
	cmd := exec.Command("systemd-analyze", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestUnitsVerify checks that systemd accepts the units and the drop-in with all settings.
func TestUnitsVerify(t *testing.T) {
	dir, names := units(t)
	secrets, err := os.ReadFile(filepath.Join(root, "deploy/systemd/secrets.conf"))
	if err != nil {
		t.Fatal(err)
	}
	dropIn := filepath.Join(dir, "kvatlas-indexer.service.d", "secrets.conf")
	if err := os.Mkdir(filepath.Dir(dropIn), 0o755); err != nil {
		t.Fatal(err)
	}
	all := regexp.MustCompile(`(?m)^#(\w+=)`).ReplaceAllString(string(secrets), "$1")
	if err := os.WriteFile(dropIn, []byte(all), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SYSTEMD_UNIT_PATH", dir+":") // otherwise systemd ignores the drop-ins there
	for _, name := range names {
		if out, err := analyze(dir, "--man=no", "verify", "./"+name); err != nil || out != "" {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
	// check that an unknown setting is found
	if err := os.WriteFile(dropIn, []byte("[Service]\nProtectSistem=strict\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, _ := analyze(dir, "--man=no", "verify", "./kvatlas-indexer.service"); !strings.Contains(out,
		"ProtectSistem") {
		t.Errorf("an unknown setting is accepted:\n%s", out)
	}
}

// TestUnitsExposure compares systemd's exposure level of the units with the greatest level in README.md.
func TestUnitsExposure(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(root, "deploy/systemd/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	stated := regexp.MustCompile(`exposure at (\d\.\d) of 10`).FindSubmatch(readme)
	if stated == nil {
		t.Fatal("README.md has no exposure level")
	}
	most, err := strconv.ParseFloat(string(stated[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	dir, names := units(t)
	for _, name := range names {
		out, err := analyze(dir, "security", "--offline=true", "--no-pager", "./"+name)
		m := regexp.MustCompile(`Overall exposure level for \S+: (\d+\.\d)`).FindStringSubmatch(out)
		if err != nil || m == nil {
			t.Errorf("%s: %v\n%s", name, err, out)
			continue
		}
		// half a point of tolerance for later versions of systemd, which check more settings
		if level, err := strconv.ParseFloat(m[1], 64); err != nil || level > most+0.5 {
			t.Errorf("%s: %s, %v\n%s", name, m[1], err, out)
		}
	}
}
