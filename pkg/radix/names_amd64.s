#include "textflag.h"

DATA ·lanes<>+0(SB)/8, $0
DATA ·lanes<>+8(SB)/8, $1
DATA ·lanes<>+16(SB)/8, $2
DATA ·lanes<>+24(SB)/8, $3
GLOBL ·lanes<>(SB), RODATA|NOPTR, $32

// BITS makes of the lanes of two vectors, all ones or zeros, eight bits.
#define BITS(low, high, to, scratch) \
	VMOVMSKPD low, to \
	VMOVMSKPD high, scratch \
	SHLQ $4, scratch \
	ORQ scratch, to

// HOME puts the number of the home of hash i into R11, and where it lies into R10. The hash stays in AX.
#define HOME(i) \
	MOVQ (DX)(i*8), AX \
	MOVQ AX, R11 \
	IMULQ SI, R11 \
	SHRQ $32, R11 \
	LEAQ (DI)(R11*8), R10

// AHEAD asks for the home of the hash that comes 32 after the one in hand, or of the last.
#define AHEAD \
	LEAQ 32(R9), AX \
	CMPQ AX, R15 \
	CMOVQGT R15, AX \
	HOME(AX) \
	PREFETCHT0 (R10) \
	PREFETCHT0 63(R10)

// PLACE looks at the eight slots from R10 on, the home of the hash in AX. It leaves the hash as a slot has it in AX,
// where among them it stands or is to stand in R11 (8: further on), and which are empty in Y1 and Y2.
#define PLACE \
	SHLQ $32, AX \
	VMOVQ AX, X0 \
	VPBROADCASTQ X0, Y0 \
	VPXOR Y14, Y0, Y0 \
	VMOVDQU (R10), Y1 \
	VMOVDQU 32(R10), Y2 \
	VPXOR Y14, Y1, Y3 \
	VPXOR Y14, Y2, Y4 \
	VPCMPGTQ Y3, Y0, Y3 \
	VPCMPGTQ Y4, Y0, Y4 \
	VPCMPEQQ Y12, Y1, Y1 \
	VPCMPEQQ Y12, Y2, Y2 \
	VPANDN Y3, Y1, Y3 \
	VPANDN Y4, Y2, Y4 \
	BITS(Y3, Y4, R11, R12) \
	NOTQ R11 \
	TZCNTQ R11, R11

// SIGNS makes of Y14 what changes signs, so that numbers without one can be compared, and of Y12 zeros.
#define SIGNS \
	VPCMPEQQ Y14, Y14, Y14 \
	VPSLLQ $63, Y14, Y14 \
	VPXOR Y12, Y12, Y12

// func findVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)
TEXT ·findVectors(SB), NOSPLIT, $0-48
	MOVQ slots+0(FP), DI
	MOVQ size+8(FP), SI
	MOVQ hashes+16(FP), DX
	MOVQ n+24(FP), CX
	MOVQ refs+32(FP), R8
	LEAQ -1(CX), R15
	SIGNS
	XORQ R9, R9
	XORQ R13, R13

find:
	CMPQ R9, CX
	JGE found
	AHEAD
	HOME(R9)
	PLACE
	CMPQ R11, $8
	JE found
	MOVQ (R10)(R11*8), BX
	XORQ BX, AX
	SHRQ $32, AX
	MOVQ R13, AX
	CMOVQEQ BX, AX // the hash is there, or it is zero and so is the slot
	MOVL AX, (R8)(R9*4)
	INCQ R9
	JMP find

found:
	MOVQ R9, done+40(FP)
	VZEROUPPER
	RET

// func enterVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)
TEXT ·enterVectors(SB), NOSPLIT, $0-48
	MOVQ slots+0(FP), DI
	MOVQ size+8(FP), SI
	MOVQ hashes+16(FP), DX
	MOVQ n+24(FP), CX
	MOVQ refs+32(FP), R8
	LEAQ -1(CX), R15
	SIGNS
	VMOVDQU ·lanes<>(SB), Y13
	XORQ R9, R9

enter:
	CMPQ R9, CX
	JGE entered
	AHEAD
	HOME(R9)
	PLACE
	BITS(Y1, Y2, R12, R13) // empty ones
	SHRXQ R11, R12, R12
	TZCNTQ R12, R12 // how many names are to move
	CMPQ R12, $8
	JA entered
	LEAQ (R10)(R11*8), R10
	MOVQ (R10), BX
	XORQ AX, BX
	SHRQ $32, BX
	JNE move
	TESTQ R12, R12
	JNE entered // the hash is there

move:
	CMPQ R12, $4
	JA moveMore
	VMOVQ R12, X7
	VPBROADCASTQ X7, Y7
	VPCMPGTQ Y13, Y7, Y7
	VMOVDQU (R10), Y8
	VMOVDQU 8(R10), Y9
	VPBLENDVB Y7, Y8, Y9, Y9
	VMOVDQU Y9, 8(R10)

value:
	MOVL (R8)(R9*4), BX
	ORQ AX, BX
	MOVQ BX, (R10)
	INCQ R9
	JMP enter

moveMore:
	SUBQ $4, R12
	VMOVQ R12, X7
	VPBROADCASTQ X7, Y7
	VPCMPGTQ Y13, Y7, Y7
	VMOVDQU (R10), Y6
	VMOVDQU 32(R10), Y8
	VMOVDQU 40(R10), Y9
	VPBLENDVB Y7, Y8, Y9, Y9
	VMOVDQU Y6, 8(R10)
	VMOVDQU Y9, 40(R10)
	JMP value

entered:
	MOVQ R9, done+40(FP)
	VZEROUPPER
	RET

// STAY counts the names in four slots, of which the first is behind slot R11, that do not stay when a gap comes before
// them: those before the first that is at its home, or is none. If there is no such one the count is more than four.
#define STAY(slots) \
	VPSRLQ $32, slots, Y5 \
	VPMULUDQ Y11, Y5, Y5 \
	VPSRLQ $32, Y5, Y5 \
	VMOVQ R11, X6 \
	VPBROADCASTQ X6, Y6 \
	VPADDQ Y10, Y6, Y6 \
	VPCMPEQQ Y6, Y5, Y5 \
	VPCMPEQQ Y12, slots, Y7 \
	VPOR Y5, Y7, Y7 \
	VMOVMSKPD Y7, R12 \
	TZCNTQ R12, R12

// func removeVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)
TEXT ·removeVectors(SB), NOSPLIT, $0-48
	MOVQ slots+0(FP), DI
	MOVQ size+8(FP), SI
	MOVQ hashes+16(FP), DX
	MOVQ n+24(FP), CX
	MOVQ refs+32(FP), R8
	LEAQ -1(CX), R15
	VMOVQ SI, X11
	VPBROADCASTQ X11, Y11
	VMOVDQU ·lanes<>(SB), Y13
	VPCMPEQQ Y14, Y14, Y14 // -1
	VPSUBQ Y14, Y13, Y10   // lanes, counted from one
	VPXOR Y12, Y12, Y12
	XORQ R9, R9

remove:
	CMPQ R9, CX
	JGE removed
	AHEAD
	HOME(R9)
	SHLQ $32, AX
	MOVL (R8)(R9*4), BX
	ORQ BX, AX
	VMOVQ AX, X0
	VPBROADCASTQ X0, Y0
	VPCMPEQQ (R10), Y0, Y1
	VPCMPEQQ 32(R10), Y0, Y2
	BITS(Y1, Y2, R12, R13)
	TZCNTQ R12, R12 // its place
	CMPQ R12, $8
	JA removed
	LEAQ (R10)(R12*8), R10
	ADDQ R12, R11

gap:
	VMOVDQU (R10), Y3
	VMOVDQU 8(R10), Y4
	STAY(Y4)
	CMPQ R12, $4
	JA four
	VMOVQ R12, X8
	VPBROADCASTQ X8, Y8
	VPCMPGTQ Y13, Y8, Y9   // lanes of names that move
	VPAND Y9, Y4, Y4
	VPSUBQ Y14, Y8, Y8
	VPCMPGTQ Y13, Y8, Y9   // and the one behind them, which becomes empty
	VPBLENDVB Y9, Y4, Y3, Y3
	VMOVDQU Y3, (R10)
	INCQ R9
	JMP remove

four: // all four move, if one of the next four does not
	VMOVDQU 40(R10), Y8
	ADDQ $4, R11
	STAY(Y8)
	CMPQ R12, $4
	JA removed
	VMOVDQU Y4, (R10)
	ADDQ $32, R10
	JMP gap

removed:
	MOVQ R9, done+40(FP)
	VZEROUPPER
	RET
