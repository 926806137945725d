//go:build judges

package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../../.."

// block is a code block of a page without its indentation.
type block struct {
	line     int // the first line on the page
	language string
	lines    []string
}

// step is a command with the output that the page shows below, if any.
type step struct {
	command string
	shown   []string
	shows   bool // the page shows the output
}

// command begins a line with a command.
var command = regexp.MustCompile(`^(?:\$ |(?:[A-Za-z_]+=\S* )?(?:indexer|worker-shim|bin/\S+|go|make|cd|tar|sudo|` +
	`curl|helm|docker|echo|mkdir|kubectl|openssl|head|chmod|vllm|python3?|pip|nats|promtool|envoy|systemctl|` +
	`journalctl|xdg-open|git|npm|jq|export|for|my-adapter|worker=\S*)(?: |$))`)

// pages are the paths of all pages with commands for users, below root.
func pages(t *testing.T) (list []string) {
	for _, pattern := range []string{"README.md", "docs/*.md", "docs/engines/*.md", "clients/python/README.md",
		"deploy/*/README.md", "deploy/*/*/README.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: no page, %v", pattern, err)
		}
		for _, path := range found {
			list = append(list, strings.TrimPrefix(path, root+"/"))
		}
	}
	return list
}

// blocksOf returns the code blocks of a page.
func blocksOf(t *testing.T, page string) (list []block) {
	text, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	for i := 0; i < len(lines); i++ {
		indent := len(lines[i]) - len(strings.TrimLeft(lines[i], " "))
		if language, fenced := strings.CutPrefix(lines[i][indent:], "```"); fenced {
			b := block{line: i + 2, language: language}
			for i++; strings.TrimSpace(lines[i]) != "```"; i++ {
				b.lines = append(b.lines, strings.TrimPrefix(lines[i], lines[i][:min(indent, len(lines[i]))]))
			}
			list = append(list, b)
		} else if indent >= 4 && indent < len(lines[i]) && i > 0 && strings.TrimSpace(lines[i-1]) == "" {
			b := block{line: i + 1}
			margin := strings.Repeat(" ", indent)
			for ; i < len(lines) && (strings.HasPrefix(lines[i], margin) || strings.TrimSpace(lines[i]) == ""); i++ {
				b.lines = append(b.lines, strings.TrimPrefix(lines[i], margin))
			}
			i--
			for b.lines[len(b.lines)-1] == "" {
				b.lines = b.lines[:len(b.lines)-1]
			}
			list = append(list, b)
		}
	}
	return list
}

// commands reports whether a block has commands.
func (b *block) commands() bool {
	return (b.language == "" || b.language == "sh") && slices.ContainsFunc(b.lines, command.MatchString)
}

// steps returns the commands of a block.
func (b *block) steps(t *testing.T) (list []step) {
	for i := 0; i < len(b.lines); i++ {
		text := b.lines[i]
		prompt := strings.HasPrefix(text, "$ ")
		if !prompt && len(list) > 0 && list[len(list)-1].shows {
			list[len(list)-1].shown = append(list[len(list)-1].shown, text)
			continue
		}
		text = strings.TrimPrefix(text, "$ ")
		for !whole(text) {
			if i++; i == len(b.lines) {
				t.Fatalf("line %d: the command does not end: %s", b.line, text)
			}
			text += "\n" + b.lines[i]
		}
		if strings.TrimSpace(text) != "" {
			list = append(list, step{command: text, shows: prompt})
		}
	}
	return list
}

// whole reports whether a command has no open quote, loop or continuation.
func whole(text string) bool {
	return !strings.HasSuffix(text, `\`) && exec.Command("bash", "-n", "-c", text).Run() == nil
}
