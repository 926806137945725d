//go:build judges

package page

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
)

// TestCurl runs the displayed command in a shell, for names with shell syntax. curl receives three arguments after the
// URL, and the last argument is JSON with the name.
func TestCurl(t *testing.T) {
	names := []string{"llama", "it's", "'; id; '", "$(id)`id`", "a\"b\\", "\x1b[2J\n\r\t", "\u202e\u2028\u0085\u009b\x7f",
		"漢字😀", "!!", "</script>", "%s%n", ""}
	given, err := json.Marshal(names)
	if err != nil {
		t.Fatal(err)
	}
	script := `import { curl } from "./static/shell.js";
		console.log(JSON.stringify(` + string(given) + `.map((model) => curl("http://127.0.0.1:8090", "/v1/select", { model }))))`
	out, err := exec.Command("node", "--input-type=module", "-e", script).Output()
	if err != nil {
		t.Fatalf("node: %v", err)
	}
	var commands []string
	if err := json.Unmarshal(out, &commands); err != nil || len(commands) != len(names) {
		t.Fatalf("%s: %v", out, err)
	}
	for i, command := range commands {
		if strings.ContainsFunc(command, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q: %q is not printable ASCII", names[i], command)
		}
		said, err := exec.Command("sh", "-c", `curl() { printf '%s\n' "$@"; }; `+command).Output()
		if err != nil {
			t.Fatalf("%q: sh: %v", command, err)
		}
		args := strings.Split(strings.TrimSuffix(string(said), "\n"), "\n")
		if len(args) != 5 || args[0] != "http://127.0.0.1:8090/v1/select" || args[3] != "-d" {
			t.Errorf("%q: curl gets %q", names[i], args)
			continue
		}
		var body struct{ Model string }
		if err := json.Unmarshal([]byte(args[4]), &body); err != nil || body.Model != names[i] {
			t.Errorf("%q: curl sends %s, %v", names[i], args[4], err)
		}
	}
}
