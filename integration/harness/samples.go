package harness

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Samples generates random texts of several kinds.
type Samples struct {
	files map[string][]string // by kind
}

// sentences are of Chinese texts.
var sentences = []string{
	"昨天晚上下了一场大雨，今天早上的空气特别清新。", "请把这份报告翻译成英文，并在星期五之前发给我。",
	"我们的服务器每天处理超过一百万个请求，平均延迟不到五十毫秒。", "如果缓存中没有找到对应的数据，系统会从数据库重新读取。",
	"他从小就喜欢音乐，长大以后成了一名钢琴老师。", "这家餐厅的鱼非常新鲜，价格也很合理。",
	"学习一门新的语言需要时间和耐心，但是结果往往令人满意。", "图书馆里很安静，学生们都在认真准备考试。",
	"火车将在下午三点二十分到达上海虹桥站。", "为了保护环境，越来越多的人选择骑自行车上班。",
	"模型在训练时使用了大量的文本，因此能够回答许多不同领域的问题。", "妈妈做的饺子是我最喜欢的食物，每次回家都要吃很多。",
	"这个函数返回列表中最大的元素，如果列表为空则返回错误。", "山上的风景很美，我们拍了许多照片作为纪念。",
	"医生建议他多喝水，多休息，少看手机。", "新的版本修复了几个重要的问题，并且改进了性能。",
}

// ReadSamples reads the files of this module. root is its folder.
func ReadSamples(t testing.TB, root string) *Samples {
	t.Helper()
	s := &Samples{files: map[string][]string{}}
	for kind, pattern := range map[string]string{"English": "docs/*.md", "code": "internal/*/*/*.go",
		"JSON": "internal/serve/server/openapi.json"} {
		paths, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(paths), err)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if kind == "English" {
				text = []byte(prose(string(text)))
			}
			if len(text) > 4000 {
				s.files[kind] = append(s.files[kind], string(text))
			}
		}
	}
	return s
}

// prose returns the paragraphs of a page without tables, examples and links.
func prose(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if c := strings.TrimSpace(line); c != "" && !strings.ContainsAny(line, "|`[_{<") && line[0] != ' ' && c[0] != '#' {
			b.WriteString(line)
		}
	}
	return b.String()
}

// SampleKinds lists the kinds of texts.
var SampleKinds = []string{"English", "code", "JSON", "Chinese", "base64", "numbers"}

// Text returns a text of a kind with about n bytes.
func (s *Samples) Text(rng *rand.Rand, kind string, n int) string {
	var b strings.Builder
	switch kind {
	case "Chinese":
		for b.Len() < n {
			b.WriteString(sentences[rng.IntN(len(sentences))])
		}
	case "base64":
		raw := make([]byte, n*3/4)
		for i := range raw {
			raw[i] = byte(rng.Uint32())
		}
		return base64.StdEncoding.EncodeToString(raw)
	case "numbers":
		for b.Len() < n {
			fmt.Fprintf(&b, "%.3f, ", rng.Float64()*1000)
		}
	default:
		list := s.files[kind]
		text := list[rng.IntN(len(list))]
		at := rng.IntN(max(1, len(text)-n))
		return strings.ToValidUTF8(text[at:min(len(text), at+n)], "")
	}
	return b.String()
}

// Quoted returns a text as JSON. A part of all clients escapes characters outside of ASCII, as Python's json does.
func Quoted(text string, ascii bool) json.RawMessage {
	quoted, _ := json.Marshal(text) // text can be encoded
	if !ascii {
		return quoted
	}
	var b strings.Builder
	for _, r := range string(quoted) {
		if r < 0x80 {
			b.WriteRune(r)
		} else if r < 0x10000 {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			fmt.Fprintf(&b, `\u%04x\u%04x`, 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff)
		}
	}
	return json.RawMessage(b.String())
}
