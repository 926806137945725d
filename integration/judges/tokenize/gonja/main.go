// Command gonja renders chat templates with github.com/nikolalohinski/gonja, as integration/python/render_chats.py does
// with Jinja2. A line on stdin is a JSON object {"template", "vars"}, and a line on stdout is {"text"} or {"error"}.
// The command is a separate module, so kvatlas does not depend on gonja.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2"
	"github.com/nikolalohinski/gonja/v2/exec"
)

type result struct {
	Text  *string `json:"text,omitempty"`
	Error string  `json:"error,omitempty"`
}

func render(line []byte, known map[string]*exec.Template) (r result) {
	defer func() {
		if p := recover(); p != nil {
			r = result{Error: fmt.Sprint("panic: ", p)}
		}
	}()
	var c struct {
		Template string
		Vars     map[string]any
	}
	if err := json.Unmarshal(line, &c); err != nil {
		return result{Error: err.Error()}
	}
	t := known[c.Template]
	if t == nil {
		var err error
		if t, err = gonja.FromString(c.Template); err != nil {
			return result{Error: err.Error()}
		}
		known[c.Template] = t
	}
	c.Vars["raise_exception"] = func(message string) (string, error) { return "", errors.New(message) }
	c.Vars["strftime_now"] = func(format string) string {
		return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).Format(strings.NewReplacer("%Y", "2006", "%m", "01", "%d", "02",
			"%b", "Jan", "%B", "January").Replace(format))
	}
	text, err := t.ExecuteToString(exec.NewContext(c.Vars))
	if err != nil {
		return result{Error: err.Error()}
	}
	return result{Text: &text}
}

func main() {
	gonja.DefaultConfig.TrimBlocks, gonja.DefaultConfig.LeftStripBlocks = true, true
	known := map[string]*exec.Template{}
	in, out := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		if err := out.Encode(render(line, known)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
