package fields

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"image"
	_ "image/gif" // the formats of images in requests
	_ "image/jpeg"
	_ "image/png"
	"strconv"
	"unicode/utf8"
)

// Sizes of media, for loads of prompts without tokens.
const (
	pixelsPerToken = 28 * 28 // of Qwen's models with images; InternVL's have the same density
	usualMedia     = 1000    // tokens of an image or another item of unknown size
	mostMedia      = 16384   // tokens of an image: engines reduce larger images
	leastData      = 1024    // bytes of a text without white space that may be data in base64
	headerBytes    = 64 << 10
)

// part is a kind of content. Its number of tokens depends on the model's vocabulary or template.
type part int

const (
	partText     part = iota // words, punctuation and white space
	partDigits               // digits
	partWide                 // characters from U+0800 on, such as Chinese
	partLetters              // letters from U+0250 to U+07FF, such as Russian
	partNames                // names of JSON fields, and the template's text around values
	partMedia                // images and other items
	partTemplate             // the template's text in each request
	parts
)

// Hundredths of a token for each element of a text. They are the means of the vocabularies of Llama 3.1, Qwen 3,
// DeepSeek V3 and gpt-oss over English, source code, JSON, base64, Chinese and numbers.
const (
	perWord    = 96  // run of Latin letters
	perExtra   = 40  // letter of a word after the first longestWord letters
	perCase    = 250 // change from a small to a capital letter in a word
	perAccent  = 100 // letter of a word outside of ASCII
	perMarks   = 82  // two adjacent punctuation marks, or a single one
	perSpaces  = 110 // run of white space other than a single blank
	perDigit   = 75
	perWide    = 66
	perLetter  = 38
	perName    = 100
	perRequest = 800

	longestWord = 8
)

// Length is the content of prompts by kinds. An [Estimator] estimates the number of tokens from it. The zero value has
// no content.
type Length struct {
	amount [parts]uint64 // in hundredths of a token
	ids    uint64        // token ids
}

// Text reports whether the length has anything beside token ids.
func (l *Length) Text() bool { return l.amount != [parts]uint64{} }

// without removes the content of another length, which is a part of l.
func (l *Length) without(other *Length) {
	for i := range l.amount {
		l.amount[i] -= other.amount[i]
	}
	l.ids -= other.ids
}

// value adds the content of a JSON value; media means that it describes an image or another item.
func (l *Length) value(value []byte, media bool) {
	switch {
	case len(value) == 0:
	case value[0] == '"':
		l.quoted(value[1:len(value)-1], media)
	case value[0] == '{':
		eachItem(value, func(name []byte, from, to int) {
			item := mediaField(name)
			if !item && !media {
				l.text(name[1 : len(name)-1])
				l.amount[partNames] += perName
			}
			l.value(value[from:to], item || media)
		})
	case value[0] == '[':
		eachItem(value, func(_ []byte, from, to int) {
			if c := value[from]; c >= '0' && c <= '9' {
				l.ids++
				return
			}
			l.value(value[from:to], media)
		})
	case !media:
		l.text(value)
	}
}

// mediaField reports whether a field of a message's part, as quoted JSON, describes an image or another item.
func mediaField(quoted []byte) bool {
	switch string(quoted) {
	case `"image_url"`, `"video_url"`, `"audio_url"`, `"input_audio"`, `"image_embeds"`, `"source"`, `"file_data"`:
		return true
	}
	return false
}

// quoted adds the content of a string.
func (l *Length) quoted(text []byte, media bool) {
	data := text
	dataURL := bytes.HasPrefix(text, []byte("data:"))
	switch {
	case dataURL:
		_, data, _ = bytes.Cut(text, []byte(","))
	case media && (bytes.HasPrefix(text, []byte("http://")) || bytes.HasPrefix(text, []byte("https://"))):
		l.amount[partMedia] += 100 * usualMedia
		return
	case len(text) < leastData || !isBase64(text[:leastData]):
		if !media {
			l.text(text)
		}
		return
	}
	tokens, known := pixels(data)
	if !known && !media && !dataURL {
		l.text(text)
		return
	}
	l.amount[partMedia] += 100 * tokens
}

// isBase64 reports whether a text has only characters of base64, of upper and lower case.
func isBase64(text []byte) bool {
	upper, lower := false, false
	for _, c := range text {
		switch {
		case c >= 'a' && c <= 'z':
			lower = true
		case c >= 'A' && c <= 'Z':
			upper = true
		case c >= '0' && c <= '9', c == '+', c == '/', c == '=', c == '-', c == '_':
		default:
			return false
		}
	}
	return upper && lower
}

// kind is a kind of character.
type kind uint8

const (
	other kind = iota
	small
	capital
	accented
	digit
	gap
	space
	mark
	letter
	wide
	pair // a character of two UTF-16 units
)

// kinds has the kinds of ASCII characters.
var kinds = func() (k [utf8.RuneSelf]kind) {
	for c := range k {
		switch {
		case c >= 'a' && c <= 'z':
			k[c] = small
		case c >= 'A' && c <= 'Z':
			k[c] = capital
		case c >= '0' && c <= '9':
			k[c] = digit
		case c == ' ':
			k[c] = gap
		case c < ' ':
			k[c] = space
		default:
			k[c] = mark
		}
	}
	return k
}()

// kindOf returns the kind of a UTF-16 unit.
func kindOf(r rune) kind {
	switch {
	case r < utf8.RuneSelf:
		return kinds[r]
	case r < 0xc0:
		return mark
	case r < 0x250:
		return accented
	case r < 0x800:
		return letter
	}
	return wide
}

// text adds the content of a JSON string without its quotation marks.
func (l *Length) text(text []byte) { measure(l, text, true) }

// measure adds the content of a text. escapes means that it has the escape sequences of JSON.
func measure[T string | []byte](l *Length, text T, escapes bool) {
	var sum, digits, wides, letters uint64
	last := other
	run := 0 // characters since the last change of the kind, or of the case in a word
	for i := 0; i < len(text); {
		k, n := kinds[text[i]&0x7f], 1
		switch c := text[i]; {
		case c == '\\' && escapes:
			k, n = escaped(text[i:])
		case c >= 0xf0:
			k, n = pair, 4
		case c >= 0xe0:
			k, n = wide, 3
		case c >= 0xc0 && i+1 < len(text):
			k, n = kindOf(rune(c&0x1f)<<6|rune(text[i+1]&0x3f)), 2
		case c >= utf8.RuneSelf:
			k = wide
		}
		i += n
		switch k {
		case small, capital, accented:
			switch {
			case last != small && last != capital && last != accented:
				sum, run = sum+perWord, 0
			case k == capital && last == small:
				sum, run = sum+perCase, 0
			}
			if run++; run > longestWord {
				sum += perExtra
			}
			if k == accented {
				sum += perAccent
			}
		case digit:
			digits += perDigit
		case gap, space:
			if last != gap && last != space {
				run = 0
			}
			if run++; run == 1 && k == space || run == 2 && last == gap {
				sum += perSpaces
			}
		case mark:
			if last != mark {
				run = 0
			}
			if run++; run%2 == 1 {
				sum += perMarks
			}
		case letter:
			letters += perLetter
		case wide:
			wides += perWide
		case pair:
			wides += 2 * perWide
		}
		last = k
	}
	l.amount[partText] += sum
	l.amount[partDigits] += digits
	l.amount[partWide] += wides
	l.amount[partLetters] += letters
}

// escaped returns the kind of the character that an escape sequence of JSON means, and the bytes of the sequence.
func escaped[T string | []byte](text T) (kind, int) {
	if len(text) < 2 {
		return mark, 1
	}
	switch text[1] {
	case 'n', 't', 'r', 'f', 'b':
		return space, 2
	case 'u':
		if len(text) >= 6 {
			if r, err := strconv.ParseUint(string(text[2:6]), 16, 16); err == nil {
				return kindOf(rune(r)), 6
			}
		}
	}
	return mark, 2
}

// pixels returns the tokens of an image in base64, by its pixels. known is false for other data.
func pixels(data []byte) (tokens uint64, known bool) {
	data = data[:min(len(data), headerBytes)&^3]
	header := make([]byte, base64.StdEncoding.DecodedLen(len(data)))
	n, _ := base64.StdEncoding.Decode(header, data)
	header = header[:n]
	width, height := webp(header)
	if c, _, err := image.DecodeConfig(bytes.NewReader(header)); err == nil {
		width, height = c.Width, c.Height
	}
	if width <= 0 || height <= 0 {
		return usualMedia, false
	}
	return min(uint64(width)*uint64(height)/pixelsPerToken+1, mostMedia), true
}

// webp returns the size of an image in WebP; zero for other data.
func webp(header []byte) (width, height int) {
	if len(header) < 30 || string(header[:4]) != "RIFF" || string(header[8:12]) != "WEBP" {
		return 0, 0
	}
	switch string(header[12:16]) {
	case "VP8X":
		return 1 + int(header[24]) + int(header[25])<<8 + int(header[26])<<16,
			1 + int(header[27]) + int(header[28])<<8 + int(header[29])<<16
	case "VP8 ":
		return int(binary.LittleEndian.Uint16(header[26:]) & 0x3fff), int(binary.LittleEndian.Uint16(header[28:]) & 0x3fff)
	case "VP8L":
		bits := binary.LittleEndian.Uint32(header[21:])
		return 1 + int(bits&0x3fff), 1 + int(bits>>14&0x3fff)
	}
	return 0, 0
}
