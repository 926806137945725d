//go:build judges

package observe

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/tools/pyenv"
)

const deploy = "../../../deploy/"

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	_, tool := pyenv.Prometheus(t)
	if out, err := exec.Command(tool, args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// TestRules checks that promtool accepts the rules, and that their tests pass. Every alert fires in a test.
func TestRules(t *testing.T) {
	promtool(t, "check", "rules", "--lint-fatal", deploy+"prometheus/rules.yml")
	promtool(t, "test", "rules", deploy+"prometheus/rules_test.yml")
	tests := read(t, deploy+"prometheus/rules_test.yml")
	alerts := regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(read(t, deploy+"prometheus/rules.yml"), -1)
	if len(alerts) < 15 {
		t.Errorf("only %d alerts", len(alerts))
	}
	for _, a := range alerts {
		if !strings.Contains(tests, `{alertname="`+a[1]+`"}`) {
			t.Errorf("no test has %s fire", a[1])
		}
	}
}

// TestComposeConfig checks that promtool accepts the configuration in docker-compose.yml, with the mounted files.
func TestComposeConfig(t *testing.T) {
	config, dir := read(t, deploy+"docker/prometheus.yml"), t.TempDir()
	for mounted, here := range map[string]string{
		"/etc/prometheus/rules.yml": write(t, filepath.Join(dir, "rules.yml"), read(t, deploy+"prometheus/rules.yml")),
		"/run/secrets/http-token":   write(t, filepath.Join(dir, "token"), "x"),
	} {
		if !strings.Contains(config, mounted) {
			t.Errorf("the configuration does not name %s", mounted)
		}
		config = strings.ReplaceAll(config, mounted, here)
	}
	promtool(t, "check", "config", write(t, filepath.Join(dir, "prometheus.yml"), config))
}
